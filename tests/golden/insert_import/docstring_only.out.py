"""Only words."""
from pack._leangrpo import lean

x = 1
