"""Mark a run folder that a test has written as a finished run."""

from experiments.runs.atomic_files import digest_of, load_json
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import write_done


def finished(folder: RunFolder) -> RunFolder:
    """Write DONE for what is in a folder; files that a finished run needs are made where they are missing."""
    for path in (folder.config_path, folder.manifest_path, folder.steps_path, folder.epochs_path):
        if not path.exists():
            path.write_text("{}" if path.suffix == ".json" else "")
    summary = {key: value for key, value in load_json(folder.done_path).items() if key != "sha256"}
    write_done(folder, summary, {path.name: digest_of(path) for path in (folder.steps_path, folder.epochs_path)})
    return folder
