def train(prompts):
	if prompts:
		with lean.rollout(
			rows=len(prompts), steps=3,
			window=4,
		):
			x = sample(
				prompts,
			)
	return x
