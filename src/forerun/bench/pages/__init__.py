"""A record for people: in a terminal, as Markdown and as a page."""
