"""Fixtures of the tests of grpo_llm.py and ppo_llm_fsdp.py as they were before ppo_llm.py was rewritten.

They stand before those of the same names one folder up. This folder is a package, so that its modules may have names
that the folder above has too.
"""

import os
import signal
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from .helpers_before import (
    SCRIPTS,
    TOY_REWARD,
    has_critic,
    load_script,
    make_args,
    make_model,
    read_metrics,
    toy_rows,
    write_rows,
)


# Of a module's scope, so that the tests of one file stay together. Tests of a costly fixture that depends on it (two
# ranks, a launch) must not parametrise it themselves: pytest would make that fixture anew for every test.
@pytest.fixture(scope="module", params=SCRIPTS)
def algo(request):
    """Each script in turn, as a module. `only_ppo` and `only_grpo` keep a test that uses it to some of them."""
    return load_script(request.param)


@pytest.fixture(scope="session")
def ppo():
    return load_script("ppo_llm_fsdp")


@pytest.fixture(autouse=True)
def as_it_was():
    """`main` may run many times in one process, with other precisions; it leaves its signal handlers behind."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="session")
def data_dir():
    folder = os.environ.get("LLM_RL_DATA")
    if not folder:
        pytest.skip("real data not found: set LLM_RL_DATA to the folder that holds it")
    return Path(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_rows(folder / "test.jsonl", toy_rows(6, 100))
    return write_rows(folder / "train.jsonl", toy_rows(24))


@pytest.fixture(scope="session")
def toy_reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(TOY_REWARD)
    return f"{path}:early"


@pytest.fixture
def toy_args(algo, tiny_model, toy_data, toy_reward, tmp_path):
    """Arguments of a run of 8 responses that takes about a second; keyword arguments override."""
    sizes = {"batch_size": 8, "group_size": 1} if has_critic(algo) else {"batch_size": 4, "group_size": 2}

    def make(**changes):
        base = {"model": tiny_model, "dataset": toy_data, "reward": toy_reward, "output_dir": str(tmp_path / "runs")}
        base |= sizes | {"minibatch_size": 4, "max_response_length": 10, "total_iterations": 2}
        return make_args(algo, **base | {"eval_every": 0, "lr": 1e-3} | changes)

    return make


@pytest.fixture
def toy_run(algo, toy_args, tmp_path):
    """Runs `main` with toy_args(**changes): (run folder, its metrics). May be called several times in one test."""

    def run(**changes):
        AcceleratorState._reset_state(True)
        name = f"run{len(list((tmp_path / 'runs').glob('run*')))}"  # default names have a resolution of one second
        run_dir = algo.main(toy_args(**{"run_name": name} | changes))
        return run_dir, read_metrics(run_dir)

    return run


@pytest.fixture
def spy(monkeypatch):
    """spy(owner, "name") -> list that grows by (positional arguments, result) with every call of owner.name."""

    def install(owner, name):
        real, calls = getattr(owner, name), []

        def wrapper(*args, **kwargs):
            result = real(*args, **kwargs)
            calls.append((args, result))
            return result

        monkeypatch.setattr(owner, name, wrapper)
        return calls

    return install
