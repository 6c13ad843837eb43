"""When replayed calls are walked: at the boundary, after a prompt group where asked for, and before a native call."""

from torch import nn
from torch.optim.optimizer import Optimizer

from . import audit, guard, replay, sync
from .errors import LeanError
from .late import Late
from .reweight import update
from .window import Window


class Settling:
    """Walks the calls of a window that are due, and compares them with a native recomputation if an audit is due.

    Args:
        late: whose switch is on during a walk, so that it reduces what native calls before it have left.

    Attributes:
        calls: how many calls of the network the update has made since the last flush.
    """

    def __init__(self, late: Late) -> None:
        self._late = late
        self.calls = 0
        self._audited: list[audit.Call] = []
        self._replays: list[replay.Replay] = []

    def audit(self, call: audit.Call) -> None:
        """Compares this call, too, once its graphs are walked."""
        self._audited.append(call)

    def note(self, replayed: replay.Replay) -> None:
        """With `reweight`: this call may have to be made natively at the boundary."""
        self._replays.append(replayed)

    def forget(self) -> None:
        """The window is over."""
        self._audited.clear()
        self._replays.clear()

    def before_native(self, window: Window, wrapper: sync.Wrapper, net: nn.Module) -> None:
        """Walks what was replayed so far, so that gradients add up in upstream's order, before a native call.

        Where a native one beside held graphs is a segmentation fault, the rest is let go.
        """
        if window.reweight is not None:  # it holds no graphs
            return
        if wrapper.alone and window.held:
            window.drop(list(window.held), "let go before a native call")
        if window.held:
            sync.tidy(net)
        if not window.consumed:
            return
        if wrapper.alone and not all(call.complete for call in window.consumed):
            raise LeanError(
                "LG606",
                "a step was replayed, its loss not yet walked, when another call of it must be recomputed",
                "run with LEANGRPO_SCHEDULE=recompute under this wrapper",
            )
        self.settle(window, wrapper, net, last=False)

    def after_group(self, window: Window, wrapper: sync.Wrapper, net: nn.Module) -> None:
        """Walks the graphs of the prompt group that has just been trained, of which nothing may be missing."""
        if window.replayed and not wrapper.alone and window.reweight is None:
            self.settle(window, wrapper, net, last=False)

    def left(self, window: Window | None) -> str:
        """What an update has not brought to its end, or nothing."""
        if window is not None and window.consumed:
            return f"{len(window.consumed)} replayed calls not yet walked"
        return ""

    def before_step(self, window: Window | None, net: nn.Module | None, optimizer: Optimizer) -> None:
        """Weights are about to change: nothing may be waiting for its flush."""
        left = self.left(window) or ("gradients that were not reduced" if self._late.pending else "")
        left = left or (f"{self.calls} calls of the update since the last lean.flush" if self.calls else "")
        if net is None or not (left or (window is not None and window.held)):
            return
        ours = {id(parameter) for parameter in guard.parameters_of(net)}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return
        if left:
            raise LeanError(
                "LG603",
                f"optimizer.step() with {left}",
                "call lean.flush(model, optimizer) before clipping and stepping; `diff-patch` shows where it belongs",
            )
        if window is not None:
            window.drop(list(window.held), "the optimizer stepped before they were used")

    def settle(self, window: Window, wrapper: sync.Wrapper, net: nn.Module, last: bool, reduce: bool = True) -> None:
        """Walks what is due; `last` at the boundary. Without `reduce`, what is reduced late stays on each rank."""
        walked = replay.due(window, wrapper, last)
        ours = {id(call) for call in walked}
        calls = [call for call in self._audited if call.belongs_to(ours)]
        self._audited = [call for call in self._audited if not call.belongs_to(ours)]
        parameters = [p for p in guard.parameters_of(net) if p.requires_grad]
        before = audit.gradients(parameters) if calls else []
        if reduce or not walked or window.reweight is not None:
            self._late.on()
        else:
            self._late.keep_local(net)
        if window.reweight is not None:
            replay.begin_walk(window, wrapper, walked, net)
            update.settle(window, wrapper, net, self._replays)
            self._replays.clear()
        else:
            replay.walk(window, wrapper, net, walked)
        if walked:
            window.walks += 1
            self._late.was_reduced()
        if calls:
            if wrapper.alone and window.held:
                window.drop(list(window.held), "let go before a native call")
            window.audits.append(audit.audit(parameters, before, calls, together=wrapper.collective))
