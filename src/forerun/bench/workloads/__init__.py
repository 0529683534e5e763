"""What is asked: the tasks, their texts and the user's own files."""
