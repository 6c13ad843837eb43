import math
try:
    import fast
except ImportError:
    fast = None
if fast:
    import faster
