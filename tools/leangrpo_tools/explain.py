"""``leangrpo explain CODE``: what each error means, what causes it, and what to do."""

from __future__ import annotations

import ast
import difflib

from leangrpo_tools import data
from leangrpo_tools.errors import CODES, KitError

EXPLAINED: dict[str, tuple[str, str]] = {
    "LG101": (
        "upstreams.lock was edited by hand, or is from another version of the kit.",
        "The message lists every bad line. Restore the file from the kit's repository.",
    ),
    "LG102": (
        "The name is not in upstreams.lock. Names may be written in any case.",
        "leangrpo list shows the known ones.",
    ),
    "LG103": (
        "The folder holds something that the kit did not put there; it is never overwritten.",
        "Give another DEST, or patch the folder itself with --tree.",
    ),
    "LG104": (
        "The upstream is not in the cache and its address cannot be reached: no network, a proxy, or a typing error.",
        "Run once where there is network (the cache can be copied: LEANGRPO_CACHE), or give a local clone, or for an "
        "upstream of a package registry the wheel: --source.",
    ),
    "LG105": (
        "The --source is no git repository, or it may not be read. For an upstream of a package registry it is no "
        "wheel, no folder that holds it and no index.",
        "git ls-remote SOURCE must work. A path must lead to a clone or a bare repository, or to the wheel. "
        "leangrpo list shows where an upstream comes from.",
    ),
    "LG106": (
        "The disk or a quota is full, there are no inodes left, or a limit on a file's size was reached (ulimit -f).",
        "Free some space and run the same command again: it repairs itself. The cache is not touched by this.",
    ),
    "LG107": (
        "The source is a fork or an old mirror that does not have the pinned commit, or a package index or a folder "
        "without the pinned wheel.",
        "Bring the mirror up to date, or use the original repository or registry.",
    ),
    "LG108": (
        "What was fetched, or what is embedded in the kit, is not what the lock file says.",
        "Restore upstreams.lock, or reinstall the kit. Do not train with such a tree.",
    ),
    "LG109": (
        "The source is a partial or damaged clone: files of the pinned commit are missing.",
        "Use a full clone as --source.",
    ),
    "LG110": (
        "git is missing, refuses the folder (another owner), holds a lock, or the repository is damaged.",
        "The message has git's own words. Remove a stale lock only when no git command runs. Then run it again.",
    ),
    "LG111": ("The installation is incomplete.", "pip install --force-reinstall leangrpo-kit"),
    "LG112": ("No permission, or a read-only file system.", "ls -ld FOLDER; choose a folder that you may write."),
    "LG113": (
        "The file was copied only in part, was changed, or is no bundle at all.",
        "Copy it again, or make it again: leangrpo bundle NAME --output FILE.",
    ),
    "LG114": (
        "The bundle holds another upstream or commit than asked for, or was made by another version of the kit.",
        "Make one with this kit, or run the kit that is in it: python FILE apply NAME --bundle FILE.",
    ),
    "LG115": (
        "An upstream of a package registry is downloaded with pip, and the Python that runs the kit has none (uv makes "
        "environments without it).",
        "python -m ensurepip, or uv pip install pip. Without pip: download the wheel by any other means and give it: "
        "--source WHEEL.",
    ),
    "LG116": (
        "The wheel is the pinned one, but a part of it could be written outside the checkout, or not the same way "
        "on every machine. Such parts are a path that leaves it, a symbolic link, or a name given twice.",
        "Nothing was written. The pin in upstreams.lock must be another wheel.",
    ),
    "LG117": (
        "The upstream was read, and hardly a forward of its updates repeats one of the rollout under the same weights.",
        "The message says which, and how many. Train with upstream's own code.",
    ),
    "LG121": (
        "An option that the command does not have, a value that it does not take, or one missing; a typing error.",
        "COMMAND --help lists them. Options begin with two dashes; a name that begins with a dash goes behind --.",
    ),
    "LG120": ("A typing error, or a code of a newer version of the kit.", "Codes look like LG201."),
    "LG131": (
        "A name is longer than file systems take (255 bytes between two slashes), or has a NUL in it.",
        "Choose a shorter name. The message has the path.",
    ),
    "LG132": (
        "Files of the cache were deleted or cut short, or the disk returns other bytes than were written. They are "
        "compared with their hashes before every use, and nothing was made from them.",
        "Run it once where there is network, or give a local clone (--source PATH) or a bundle (--bundle FILE): the "
        "cache is then filled again by itself.",
    ),
    "LG122": (
        "The kit was installed without its dependencies, or another project pins one of them in a version that the kit "
        "cannot use, as DanceGRPO's pins do with pydantic.",
        "Install the kit in an environment of its own. verify-patch and bench-patch take --python with the interpreter "
        "that trains.",
    ),
    "LG199": (
        "A fault of the kit, or something on this machine that it does not know. What it says of a patch or a "
        "rehearsal does not count.",
        "The message names a file with the details. Report it. LEANGRPO_DEBUG=1 prints them at once.",
    ),
    "LG201": (
        "The file differs from the pinned commit where the patch goes: a call was renamed, removed or doubled. The "
        "message says what was looked for, how often it was expected and found, and the lines that come close. A "
        "flush must come before gradients are unscaled and clipped: where these stand outside of the block that "
        "steps, there is no such place. Nothing was written.",
        "If some places were found, choose: the message has the --anchor options (several lines with commas). If "
        "none was found, change the lines back to the pin's shape. Or leave the script out with --script, or patch "
        "the others with --allow-partial.",
    ),
    "LG202": ("A recipe was edited, or is from another version of the kit.", "The message lists every bad entry."),
    "LG203": ("The recipe has no script of that name.", "leangrpo list shows the scripts of each upstream."),
    "LG204": (
        "The file is not valid Python: an edit in progress, merge markers, or syntax newer than the Python that runs "
        "the command.",
        "python -m py_compile FILE shows the place.",
    ),
    "LG205": (
        "The parser cannot give the file back byte for byte (an unusual encoding or mixed line ends), so it is left "
        "alone.",
        "Save it as UTF-8 with one kind of line end.",
    ),
    "LG206": (
        "The file already uses a name that the patch needs (lean, lean_rows, ...). It was patched by hand or by a "
        "state that was lost, or the name means something else there.",
        "Restore the file from before the patch, or rename what has that name.",
    ),
    "LG207": ("A fault of a recipe or a codemod. Nothing was written.", "Report the file and the message."),
    "LG208": ("A training script of many megabytes is none.", "Look at the file; move data out of it."),
    "LG209": (
        "--anchor takes EDIT=LINE, with the edit's name as error LG201 prints it. Lines are those before the patch.",
        "Paste the option from the error, with the script's name in front if several scripts have such an edit.",
    ),
    "LG210": (
        "The kit knows the script and has no patch for it: the method cannot take it as it is written. The message "
        "says what stands in the way.",
        "Train it as it is. The other scripts of the upstream can be patched beside it; leangrpo list names them.",
    ),
    "LG301": (
        "The folder does not exist, was never patched, or was reverted.",
        "ls -d FOLDER; leangrpo status FOLDER. apply-patch NAME --tree FOLDER patches it.",
    ),
    "LG302": (
        "You edited lines that the patch put there, or lines beside them, and now the patch changes or goes. Your "
        "text is under <<<<<<< yours, the kit's under =======. Nothing else was touched.",
        "Edit the marked lines and run the same command again; it goes on from there. revert-patch DEST --abort puts "
        "the files back as they were before the merge.",
    ),
    "LG303": (
        "A path has .. in it, or leads through a symbolic link or into a repository of its own (a submodule): a patch "
        "there would change files elsewhere.",
        "Put a copy in place of the link, or patch a copy of the tree.",
    ),
    "LG305": ("A file or folder is read-only, or belongs to somebody else.", "chmod u+w FILE, then run it again."),
    "LG306": (
        "The folder is no checkout of this upstream, or a script or a file that it imports was renamed or left out. "
        "Scripts that you did not name and that the tree does not have are no error.",
        "--script-as SCRIPT=FILE names a script's file, --script S leaves others out, --tree may be a folder inside "
        "a repository. A helper file needs no option if the script imports it by name: the patch goes where the "
        "import leads.",
    ),
    "LG307": (
        "The folder for the runtime exists: a folder of your own, or files of an earlier patch that you edited.",
        "Remove or rename it.",
    ),
    "LG308": (
        "The files under .leangrpo say what was patched. They are gone or damaged, or were written by a newer "
        "version of the kit. A copy of a patched tree needs .leangrpo, too. Nothing was changed.",
        "Update the kit, or restore .leangrpo. Otherwise the message has the commands that put the files back as "
        "they were. Texts from before the patch are in .leangrpo/store, named by their sha256, and in git under "
        "refs/leangrpo/base.",
    ),
    "LG309": (
        "A run was interrupted halfway, and files were edited before the next one could complete it.",
        "Move the edited files aside, run the same command again, then put your edits back. A file that is not "
        "there is written anew.",
    ),
    "LG310": (
        "The tree is patched for another upstream, or has files of another one and nothing that only this one has.",
        "Name the upstream that the message names. To change it in a patched tree, revert-patch first.",
    ),
    "LG311": (
        "--script-as takes SCRIPT=FILE with a path inside the tree, once per script; a script that is patched already "
        "keeps its file.",
        "revert-patch first to patch the script in another file.",
    ),
    "LG312": (
        "--strict-pin was given, and the tree is at another commit than the pin or is no git repository. For an "
        "upstream of a package registry it has another version of the project.",
        "Check the pinned commit out, or install the pinned version, or leave --strict-pin out: then the patch goes "
        "by its anchors.",
    ),
    "LG401": (
        "Upstream's own script does not run on this machine: a missing package, or a changed script.",
        "The message names the log. This says nothing about whether the patch is right.",
    ),
    "LG402": (
        "The script runs, but the rehearsal could not write down or read what it computed: the tree uses tensors, an "
        "optimizer or a wrapper that the recorder does not know.",
        "This says nothing about the patch. Report the message and the logs. In training, LEANGRPO_AUDIT=first "
        "compares with a native recomputation.",
    ),
    "LG411": (
        "A warning: every update is equal, but the patched run recomputed each step, as upstream does, so the patch "
        "saves nothing. The message has the runtime's reasons, such as dropout that is active.",
        "Remove the reason if you can. The exit status is 0; verify-patch --strict makes it 1.",
    ),
    "LG412": (
        "A warning: every update is equal, but the patch saves less than it could. Upstream's first update after a "
        "rollout evaluates the policy again; the patched run replayed only a part of that. The message counts by "
        "window and rank, from the policy's forwards, and has the runtime's reasons.",
        "Remove the reason if you can: ids of rows or steps that do not fit, a flush or a window in the wrong place. "
        "The exit status is 0; verify-patch --strict makes it 1.",
    ),
    "LG413": (
        "A warning: every update is equal, but the rollout held graphs that the first update after it did not use: "
        "memory that saves nothing.",
        "The window is larger than an update, or rows and steps have ids that do not fit: see the places `window`, "
        "`policy` and `order` in diff-patch. verify-patch --strict makes the exit status 1.",
    ),
    "LG405": (
        "--python names no Python interpreter, one that does not start, or one older than 3.10.",
        "Give the interpreter of the environment that trains: --python /path/to/env/bin/python. Nothing is installed "
        "into that environment, or written there.",
    ),
    "LG404": (
        "The interpreter that rehearses lacks a package that the script needs, or has it in a version that is too old. "
        "Some scripts need newer packages than upstream's own pins.",
        "Give --python with an environment that can train this script. The message names package and version.",
    ),
    "LG403": ("The script has no rehearsal, or not with these options.", "The message lists what is allowed."),
    "LG501": (
        "No launch file was given, or it is missing, is no regular file or no text file, or is larger than 1 MiB.",
        "Give one of upstream's launch files: --launch FILE.",
    ),
    "LG502": (
        "The launch file starts none of the upstream's known scripts, or several with different figures, or the script "
        "that trains a preset is not known.",
        "Give the file that starts the training script itself, --script S where it has another name, or --line N.",
    ),
    "LG503": (
        "The launch file takes the number of processes from a variable or from the machine, or what it starts may be "
        "several processes.",
        "Say it: --ranks N.",
    ),
    "LG504": (
        "A flag that decides the plan is missing, its value comes from a variable, or it is no number.",
        "Say it: --set NAME=VALUE, for a flag of a launch file or an entry of a preset.",
    ),
    "LG505": ("With these settings upstream would make no update, or stop.", "The message names the setting."),
    "LG506": (
        "Upstream ships no launch file for it that has the numbers: they are in a script or config of your own.",
        "leangrpo list says what its updates per rollout are, and what decides.",
    ),
    "LG507": ("A data file of the kit is damaged or was edited.", "Reinstall the kit."),
    "LG508": (
        "The config is missing, is no Python, has no such preset, or does not end.",
        "The message names file and line. Give a preset as --preset FILE:NAME.",
    ),
    "LG509": (
        "The preset takes the value from something that only a run knows, such as an environment variable.",
        "Say it: --set ENTRY=VALUE, as in --set sample.num_steps=10.",
    ),
    "LG601": (
        "A LEANGRPO_* variable or a line of .leangrpo/config.yaml is misspelt or has a value that is not allowed.",
        "The message lists the allowed ones.",
    ),
    "LG602": (
        "A launcher exported the settings to some nodes only, or the nodes read different config files.",
        "Export the same LEANGRPO_* variables everywhere. The message has both values.",
    ),
    "LG603": (
        "optimizer.step() ran before lean.flush(): the flush was removed, or the step is made somewhere else, too.",
        "Put lean.flush(model, optimizer) first in the block that clips and steps; diff-patch shows where it was.",
    ),
    "LG604": (
        "Something changed the network between a replay and the flush. It may be its weights (a second optimizer, "
        "EMA swapped in, a checkpoint loaded), a buffer, a frozen layer, an adapter, an attribute or a hook.",
        "Move the change behind optimizer.step(), or train with LEANGRPO_SCHEDULE=recompute.",
    ),
    "LG605": (
        "The script calls backward twice for one network call (retain_graph, two losses).",
        "Add the losses and call backward once, or train with LEANGRPO_SCHEDULE=recompute.",
    ),
    "LG606": (
        "Under this wrapper a native call may not run while graphs are held, and the update makes one.",
        "Train with LEANGRPO_SCHEDULE=recompute under this wrapper.",
    ),
    "LG607": (
        "On this machine's kernels the kept graphs give another gradient than recomputing does: a non-deterministic "
        "kernel, or something the runtime does not see.",
        "Train with LEANGRPO_SCHEDULE=recompute, and report the line and the start line.",
    ),
    "LG608": (
        "The kept graphs do not fit beside the rest.",
        "Set LEANGRPO_BUDGET_GB (LEANGRPO_OFFLOAD_GB, if the host's memory is full) to less than the figure in the "
        "message; what does not fit is recomputed.",
    ),
    "LG609": (
        "Ranks have different gradients after the reduction: they were not in step.",
        "Train with LEANGRPO_SCHEDULE=recompute, and report the start line.",
    ),
    "LG610": (
        "The calls of the patched script come in another order than the patch made: it was edited, or a rollout began "
        "before the last update was flushed.",
        "Compare with diff-patch. Each update must end with lean.flush(model, optimizer) before the next rollout.",
    ),
    "LG611": (
        "Another rank stopped, was killed or left the common path while this one waited for it.",
        "Look for the first error of the rank that is named; this one is only its consequence. A rank that was killed "
        "without a word (out of memory on the host, say) is known by not having come as far as the others.",
    ),
    "LG612": (
        "With LEANGRPO_SYNC=late or group natively recomputed calls are reduced together, by the last one's backward. "
        "Some weights got a gradient in an earlier call and none in that one: not all of the network is always used.",
        "Train with LEANGRPO_SYNC=upstream.",
    ),
    "LG613": (
        "LEANGRPO_LAYOUT=shared or LEANGRPO_UPDATES=on-policy is set, and the numbers of prompts, samples, ranks "
        "and samples per update do not fit together. Or the script's rollout cannot be cut by prompt, or ranks "
        "share no gradients or a seed.",
        "The message says which numbers would do. Unset both to train as upstream does.",
    ),
    "LG614": (
        "With LEANGRPO_SCHEDULE=reweight a sample has to be recomputed, with the arguments that the update gave, and "
        "something has written into one of them since.",
        "Train with LEANGRPO_SCHEDULE=retain, which needs no argument a second time.",
    ),
}


def titles() -> dict[str, str]:
    """Every code with its title. The runtime's are read from its source: importing it would import torch."""
    found = {code: item.title for code, item in CODES.items()}
    tree = ast.parse((data.core_path() / "errors.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CODES":
            found |= ast.literal_eval(node.value)
    return found


def explain(code: str) -> str:
    """Title, cause and what to do. Raises LG120 for a code that does not exist."""
    known, wanted = titles(), code.upper()
    if wanted not in known:
        near = difflib.get_close_matches(wanted, sorted(known), n=1, cutoff=0)[0]
        listed = ", ".join(sorted(known))
        fix = f"leangrpo explain {near}"
        raise KitError("LG120", f"there is no error {code}", cause=f"known: {listed}", fix=fix)
    cause, help_ = EXPLAINED[wanted]
    return f"{wanted}: {known[wanted]}\n\ncause: {cause}\n\nwhat to do: {help_}"
