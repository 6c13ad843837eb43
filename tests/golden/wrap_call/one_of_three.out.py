def step(network, x):
    y = lean.rollout_call(network, rows, x)[0]
    if guide:
        without = network(x)[0]
        y = without + 2 * (y - without)
    with adapters_off(network), timer():
        y = network(x)[0]
    return network(y)
