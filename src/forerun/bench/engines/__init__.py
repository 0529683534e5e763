"""What answers: engines in this process, servers that are launched or that run already, and the protocol they speak."""
