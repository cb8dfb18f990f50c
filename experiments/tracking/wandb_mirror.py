"""Mirror a run to Weights & Biases: what that needs here, the rows of its folder, and each further row of rank 0."""

import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Literal, cast

from experiments.config.errors import UserError, as_user_error, check_choice, one_line_with_type
from experiments.config.schema import TrackingConfig
from experiments.runs.files import load_json
from experiments.runs.records import Row, read_records
from experiments.runs.run_folder import RunFolder

_MODES = ("online", "offline", "disabled", "dryrun", "shared")  # values of wandb's own setting
KINDS = ("steps", "epochs")
FOLDER = "run_folder"  # key of a mirror's configuration: the name of the run's folder
INIT_S = 10.0  # most seconds that the start of a run waits for W&B
_STOPPED_S = 5.0  # most seconds that a stopped run waits: the mirror restarts when the run resumes


def check_wandb(tracking: TrackingConfig) -> None:
    """Check that the configured mirror works on this machine. Raises: UserError."""
    if tracking.name != "none":
        require_wandb("tracking=wandb")
        if tracking.mode == "online":
            require_key("tracking.mode=online", "use tracking.mode=offline")


def require_wandb(needed_by: str) -> None:
    """Check that wandb is installed and supports WANDB_MODE. Raises: UserError, naming ``needed_by``."""
    if find_spec("wandb") is None:
        raise UserError(f"{needed_by} needs the package wandb, which is not installed: pip install wandb")
    if given := os.environ.get("WANDB_MODE", ""):
        check_choice("WANDB_MODE", _MODES, given)


def require_key(needed_by: str, otherwise: str) -> None:
    """Check without a prompt that wandb finds an API key. Raises: UserError, with ``needed_by`` and the alternative."""
    import wandb

    with as_user_error(Exception, before=f"{needed_by}: "):  # any: a malformed key, invalid settings
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            if wandb.login(prompt=False):
                return
        raise ValueError(f"W&B found no key: set WANDB_API_KEY, or {otherwise}")


class Mirror:
    """One run at W&B, starting with the rows of its folder.

    A resumed run starts over, because rows after the checkpoint were removed from its folder. All methods pass on
    errors of wandb.
    """

    def __init__(self, folder: RunFolder, tracking: TrackingConfig) -> None:
        os.environ.update(WANDB_ERROR_REPORTING="false", WANDB_SILENT="true")  # wandb reads these before its settings
        import wandb

        self._folder, name = folder, folder.path.name
        self._run = wandb.init(
            id=name,  # an existing run with this id starts over; under an agent W&B uses the agent's id
            name=name,
            project=tracking.project,
            entity=tracking.entity,
            group=re.sub(r"-s\d+-[0-9a-f]{8}(-rerun-\d+)?$", "", name),  # without seed and hash
            job_type="train",
            tags=list(tracking.tags),
            dir=str(folder.path),
            mode=cast(Literal["offline", "online"], tracking.mode),
            config={
                **folder.config(),
                "manifest": load_json(folder.manifest_path),
                FOLDER: name,
            },
            settings=wandb.Settings(  # do not wait, and do not record this process: the manifest describes the run
                console="off",
                silent=True,
                init_timeout=INIT_S,
                finish_timeout=tracking.finish_s,
                finish_timeout_raises=True,
                save_code=False,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self._files = Path(self._run.dir).parent
        for kind in KINDS:
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        for kind, row in _rows(folder):
            self.log(kind, row)

    def log(self, kind: str, row: Mapping[str, Any]) -> None:
        """Log a row of ``steps`` or ``epochs``."""
        self._run.log({f"{kind}/{key}": value for key, value in row.items()})

    def finish(self) -> str:
        """Finish the run and remove earlier mirrors; return its address, or offline its folder."""
        is_done = self._folder.is_done()
        if is_done:
            self._run.summary["done"] = load_json(self._folder.done_path)
        else:
            self._run.settings.finish_timeout = min(self._run.settings.finish_timeout, _STOPPED_S)
        self._run.finish(exit_code=0 if is_done else 1)
        for earlier in self._files.parent.glob("*run-[0-9]*"):  # any id: all in this folder belong to this run
            if earlier != self._files:
                shutil.rmtree(earlier, ignore_errors=True)
        return self._run.url or str(self._files)

    def drop(self) -> None:
        """Abandon an unfinished mirror, and remove its files."""
        self._run.settings.finish_timeout = _STOPPED_S
        try:
            self._run.finish(exit_code=1)
        finally:
            shutil.rmtree(self._files, ignore_errors=True)


def mirror(folder: RunFolder, tracking: TrackingConfig) -> str:
    """Mirror a run from its folder; return the address or the folder of the mirror.

    An earlier mirror is removed when the new one is complete.
    """
    made = Mirror(folder, tracking)
    try:
        return made.finish()
    except BaseException:
        made.drop()
        raise


@contextmanager
def live_mirror(folder: RunFolder, tracking: TrackingConfig) -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
    """Yield a function that mirrors each row during training; a failure of W&B is a single warning."""
    has_failed = False

    def attempt(work: Callable[[], Any]) -> Any:
        nonlocal has_failed
        try:
            return None if has_failed else work()
        except Exception as error:  # any error of wandb
            has_failed = True
            _end_wandb()
            again = f"recreate it with: python -m experiments.track {folder.path}"
            problem = f"{one_line_with_type(error)}; the run's records are complete, {again}"
            print(f"warning: W&B mirror: {problem}", file=sys.stderr)
            return None

    made: Mirror | None = attempt(lambda: Mirror(folder, tracking))
    try:
        yield lambda kind, row: attempt(lambda: made.log(kind, row)) if made else None
    finally:
        if made:
            attempt(made.finish)


def _end_wandb() -> None:
    """End W&B's process, or detach from it: Python's exit might wait for it for hours."""
    import wandb

    def end() -> None:
        with suppress(Exception, SystemExit):
            wandb.teardown()

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    thread.join(_STOPPED_S)


def _rows(folder: RunFolder) -> list[tuple[str, Row]]:
    """Return the rows of a run in the order of training, by finished steps."""
    paths = {kind: folder.path / f"{kind}.jsonl" for kind in KINDS}
    rows = [(kind, row) for kind, path in paths.items() if path.exists() for row in read_records(path)]
    return sorted(rows, key=lambda item: item[1]["step"] + (item[0] == "steps"))  # stable: steps first
