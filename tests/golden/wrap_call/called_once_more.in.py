def step(network, x, i):
    network(x)
    return network(x)
