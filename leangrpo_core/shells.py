"""Modules that hand their calls on to the network. Some trainers put their adapters alone into one, for DDP to wrap."""

from weakref import WeakKeyDictionary, ref

from torch import nn

_CALLED: "WeakKeyDictionary[nn.Module, ref[nn.Module]]" = WeakKeyDictionary()


def hands_on(shell: nn.Module, net: nn.Module) -> None:
    """From here on a call of `shell` counts as one of `net` with the same arguments, as the recipe says it is."""
    if shell is not net:
        _CALLED[shell] = ref(net)


def called(module: nn.Module) -> nn.Module:
    """The network that a call of `module` evaluates: itself, unless it is a shell."""
    net = _CALLED.get(module)
    return (net() if net is not None else None) or module


def why_other(module: nn.Module) -> str:
    """Why a call of the shell is another evaluation than one of its network, or nothing.

    accelerate puts autocast into the `forward` of the module that it prepares, where no look at the autocast state
    around the call can see it.
    """
    if called(module) is module or "forward" not in vars(module):
        return ""
    return (
        f"the update calls the network through {type(module).__name__}, whose forward was replaced (by accelerate, for "
        "mixed precision), and the rollout goes around it"
    )
