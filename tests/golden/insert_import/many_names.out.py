from a import (
    b,  # one
    c,
)
from pack._leangrpo import lean
def f(): pass
