"""The recipe for TRL on two small files that have its functions: which lines it writes, and where."""

from __future__ import annotations

import difflib
import textwrap

import pytest

from leangrpo_tools import recipe
from leangrpo_tools.transform import Patched, transform

PIPELINE, TRAINER = "trl/models/modeling_sd_base.py", "trl/trainer/ddpo_trainer.py"
TEXT = {
    PIPELINE: """\
        import torch


        def pipeline_step(self, text, times):
            state = start(self)
            for i, t in enumerate(times):
                guess = self.unet(state, t, text)
                state = scheduler_step(self.scheduler, guess, t, state)
            return state


        def pipeline_step_with_grad(pipeline, text, times):
            state = start(pipeline)
            for i, t in enumerate(times):
                state = advance(pipeline.unet(state, t, text), state)
            return state
        """,
    TRAINER: """\
        import torch


        class DDPOTrainer:
            def step(self, epoch):
                samples, pictures = self._generate_samples(
                    2,  # calls
                    4,
                )
                total_batch_size, length = samples["times"].shape
                for turn in range(2):
                    # rows
                    perm = torch.randperm(total_batch_size, device=self.where)
                    # steps
                    order = torch.stack([torch.randperm(length, device=self.where) for _ in range(total_batch_size)])
                    samples = reorder(samples, perm, order)

                    original_keys = list(samples)
                    self._train_batched_samples(split(samples, original_keys))

            def calculate_loss(self, state, times):
                if self.guided:
                    guess = self.sd_pipeline.unet(
                        twice(state),
                        twice(times),
                    )
                else:
                    guess = self.sd_pipeline.unet(state, times)
                return guess.mean()

            def _generate_samples(self, iterations, batch_size):
                samples = []
                for _ in range(iterations):
                    samples.append(self.sd_pipeline(self.sd_pipeline.tokenizer(self.prompt_fn())))
                return samples, None

            def _train_batched_samples(self, batches):
                for sample in batches:
                    for j in range(self.num_train_timesteps):
                        loss = self.calculate_loss(sample["state"][:, j], sample["times"][:, j])
                        self.accelerator.backward(loss)
                        if self.accelerator.sync_gradients:
                            self.accelerator.clip_grad_norm_(self.trainable_layers, 1.0)
                        self.optimizer.step()
                        if self.accelerator.sync_gradients:
                            self.accelerator.log(loss)


        class AlignPropTrainer:
            def step(self, epoch):
                return self.sd_pipeline.unet(torch.randperm(epoch))
        """,
}
ADDED = {
    PIPELINE: """\
        from trl._leangrpo import lean
                guess = lean.rollout_call(self.unet, lean.rows, i, state, t, text)
                state = lean.scored(scheduler_step, self.scheduler, guess, t, state)
        """,
    TRAINER: """\
        from trl._leangrpo import lean
                with lean.rollout(
                    rows=self.config.sample_num_batches_per_epoch * self.config.sample_batch_size,
                    steps=self.config.sample_num_steps,
                    trained=self.num_train_timesteps,
                    window=self.config.train_batch_size * self.config.train_gradient_accumulation_steps,
                    batch=self.config.train_batch_size,
                    shuffled=True,
                    device=self.accelerator.device,
                ):
                    samples, pictures = self._generate_samples(
                        2,  # calls
                        4,
                    )
                    perm = lean.row_order(total_batch_size, device=self.where)
                    order = lean.step_order(total_batch_size, length, device=self.where)
                    samples.update(lean.identity(perm.device))
                    guess = lean.policy_call(
                        self.sd_pipeline.unet, lean.rows, lean.steps,
                    guess = lean.policy_call(self.sd_pipeline.unet, lean.rows, lean.steps, state, times)
                    lean.at(range(len(samples) * batch_size, (len(samples) + 1) * batch_size))
                        lean.at(sample.get("lean_row"), sample.get("lean_step"), j)
                            lean.flush(self.sd_pipeline.unet, self.optimizer)
        """,
}


def edits(file: str) -> list[recipe.Edit]:
    return [edit for edit in recipe.load("trl-ddpo").find("ddpo").edits if edit.file == file]


@pytest.mark.parametrize("file", [PIPELINE, TRAINER])
def test_what_is_written(file: str) -> None:
    text = textwrap.dedent(TEXT[file])
    result = transform(file, text.encode(), edits(file))
    assert isinstance(result, Patched), result
    changed = list(difflib.ndiff(text.splitlines(), result.data.decode().splitlines()))
    assert [line[2:] for line in changed if line.startswith("+ ")] == textwrap.dedent(ADDED[file]).splitlines()


def test_a_network_called_once_more_is_refused() -> None:
    extra = textwrap.dedent(TEXT[TRAINER]).replace("return guess.mean()", "return self.sd_pipeline.unet(guess)")
    result = transform(TRAINER, extra.encode(), edits(TRAINER))
    assert isinstance(result, list) and "wrap_call" in result[0].text()
