def step(network, x, i):
    network.eval()
    y= lean.rollout_call(
            network, rows, i,
            state=x,
            # the scale
            scale = 2,  # of all
            guide=make(
                3,
            ),
    )[0]
    return y
