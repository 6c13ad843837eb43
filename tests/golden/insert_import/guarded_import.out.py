import math
from pack._leangrpo import lean
try:
    import fast
except ImportError:
    fast = None
if fast:
    import faster
