def step(network, x, i):
    return network(state=x, **x)
