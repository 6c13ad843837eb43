import math
from pack._leangrpo import lean

def first():
    pass

import torch
