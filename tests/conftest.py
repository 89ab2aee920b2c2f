"""`pytest --script my_ppo.py tests/test_oracle.py` tests a changed copy in place of the script that it is nearest to.

A test takes a copy if it has the fixture `script`, on which `algo` and `toy_run` stand: of the script that
`each_script` names, or SCRIPT in its file, or else of any. The others don't run. Fixtures are in helpers.py.
"""

import gc
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # oversubscribed threads spin and run ten times slower
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the same tests with and without GPUs
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "notes"))

import variants

ROOT = Path(__file__).resolve().parent.parent
PLACE = "SCRIPTS_UNDER_TEST"  # in the environment: the folder in which a copy stands in for its script


def pytest_addoption(parser):
    parser.addoption("--script", help="a changed copy of a script: its tests, with the copy in its place")


def pytest_configure(config):
    """Puts the copy, by its script's name, into a folder of its own, with links to all that is beside the script."""
    copy = config.getoption("--script")
    if copy is None or PLACE in os.environ:  # a worker of pytest-xdist has its folder from the main process
        return
    original = variants.nearest(Path(copy).read_text()) if Path(copy).is_file() else None
    if original is None:
        raise pytest.UsageError(f"--script {copy} names no changed copy of {', '.join(variants.SCRIPTS)}")
    folder = Path(tempfile.mkdtemp())
    config.add_cleanup(lambda: shutil.rmtree(folder))
    config.add_cleanup(lambda: os.environ.pop(PLACE, None))
    for path in ROOT.iterdir():
        if path.name != original:
            (folder / path.name).symlink_to(path)
    shutil.copy(copy, folder / original)
    os.environ[PLACE] = str(folder)


def pytest_sessionstart(session):
    """Loads the fixtures, but not in the process that only hands out tests to the workers: torch takes seconds."""
    if not session.config.pluginmanager.has_plugin("dsession"):
        gc.disable()  # a process of tests is short; collections cost a twelfth of its time
        session.config.add_cleanup(gc.freeze)  # the last one, of Python itself, takes three seconds
        session.config.pluginmanager.import_plugin("helpers")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """What needs peft is skipped without one that transformers takes; 5.24, on which the scripts run, takes none."""
    report = yield
    if report.failed and re.search("No module named 'peft'|version of PEFT you are using", report.longreprtext):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "LoRA needs the extra `lora`")
    return report
