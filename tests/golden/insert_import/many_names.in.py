from a import (
    b,  # one
    c,
)
def f(): pass
