import math
def f():
    lean = 3
    return lean
