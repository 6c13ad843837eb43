def train(prompts):
    with torch.no_grad(), timer() as t, lean.rollout(
        rows=len(prompts), steps=3,
    ):
        sample(prompts)
