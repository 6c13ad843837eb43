import math

def first():
    pass

import torch
