"""Sizes of networks whose width and depth a launch file chooses: parameters, and what autograd saves for a graph.

The closed forms were fitted to what autograd saves of diffusers' FLUX blocks on CPU, of which they give all but 3 %
(tests/unit/test_plan_families.py); CUDA keeps some norms in fp32 and saves somewhat more.
"""

from __future__ import annotations

from leangrpo_tools.plan.networks import Model


def flux(
    width: int, double: int, single: int, *, head: int, channels: int, text: int, text_tokens: int, sixteen_bit: bool,
    guidance: bool = False, patch: int = 1, copied: bool = False,
) -> Model:  # fmt: skip
    """A FLUX transformer that is trained as a whole.

    Args:
        width: of its tokens.
        double: blocks with weights of their own for image and text.
        single: blocks for both together.
        head: width of an attention head.
        channels: of an image token on its way in and out.
        text: width of a text token and of the pooled text on its way in.
        text_tokens: of a prompt.
        sixteen_bit: under autocast to bf16 or fp16.
        guidance: the network has a guidance embedding.
        patch: pixels along each side of a token.
        copied: the network gets copies of its inputs, as FSDP makes them.
    """
    square = width * width
    in_double = 36 * square + 30 * width + 4 * head
    in_single = 15 * square + 11 * width + 2 * head
    timestep = 256 * width + square + 2 * width
    root = (channels + text) * width + 2 * width + timestep * (2 if guidance else 1)
    root += text * width + square + 2 * width + 2 * square + 2 * width + width * channels + channels
    if sixteen_bit:
        kept = double * (56 * width + 12 * width / head + 8) + single * (50 * width + 12 * width / head + 4)
        call = double * (72 * square + 36 * width) + single * (30 * square + 10 * width)
        image, words = 6 * width + 8 * head + 2 * channels + 4, 4 * width + 8 * head
        ends = 8 * square + 48 * width + (2 * square + 96 * width if guidance else 0)
    else:
        kept = double * (96 * width + 12 * width / head + 16) + single * (84 * width + 12 * width / head + 8)
        call = double * 72 * width + single * 20 * width
        image, words = 12 * width + 8 * head + 8, 4 * width + 8 * head
        ends = 32 * width
    if copied:
        image, words = image + (2 if sixteen_bit else 4) * channels, words + (2 if sixteen_bit else 4) * text
    return Model(
        parameters=double * in_double + single * in_single + root,
        patch=patch,
        text_tokens=text_tokens,
        largest_unit=max(in_double if double else 0, in_single if single else 0),
        root_parameters=root,
        blocks=double + single,
        width=width,
        image_token_bytes=kept + image,
        text_token_bytes=kept + words,
        call_bytes=call + ends,
        end_image_bytes=image,
        end_text_bytes=words,
        end_call_bytes=ends,
        image_token_flops=double * 24 * square + single * 24 * square,
        text_token_flops=double * 24 * square + single * 24 * square,
    )


def sd3(width: int, layers: int, *, head: int, rank: int, text_tokens: int, sixteen_bit: bool) -> Model:
    """An SD3 transformer without norms of queries and keys, of which a LoRA on the attention's projections is trained.

    Args:
        width: of its tokens.
        layers: blocks; the last one drops the text.
        head: width of an attention head.
        rank: of the LoRA.
        text_tokens: of a prompt.
        sixteen_bit: under autocast to bf16 or fp16.

    Parameters are not counted: only bytes of graphs are meant.
    """
    if sixteen_bit:
        token, dropped = 28 * width + 4 * width / head + 8 * rank + 8, 14 * width + 2 * rank + 8
        row = 32 * width * layers - 16 * width
        call = layers * (48 * width**2 + 32 * rank * width) - 30 * width**2 - 504 * width
    else:
        token, dropped = 48 * width + 4 * width / head + 16 * rank + 16, 24 * width + 4 * rank + 16
        row, call = 64 * width * layers - 160 * width, 128 * width
    return Model(
        parameters=0.0,
        patch=1,
        text_tokens=text_tokens,
        blocks=layers,
        width=width,
        image_token_bytes=layers * token,
        text_token_bytes=layers * token - dropped + row / text_tokens,
        call_bytes=call,
    )
