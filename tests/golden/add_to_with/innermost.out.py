def train(prompts):
	with torch.no_grad():
		before()
		with torch.no_grad(), lean.rollout(
			rows=len(prompts), steps=3,
		):
			sample(prompts)
