"""Only words."""

x = 1
