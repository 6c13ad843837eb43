class Trainer:
    async def step(self, lean_rows=None):
        return self

class Other:
    def step(self):
        return self
