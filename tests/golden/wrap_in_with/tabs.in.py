def train(prompts):
	if prompts:
		x = sample(
			prompts,
		)
	return x
