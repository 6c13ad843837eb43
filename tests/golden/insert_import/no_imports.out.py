# a comment
from pack._leangrpo import lean
x = 1
