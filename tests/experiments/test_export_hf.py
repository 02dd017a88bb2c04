"""The export of a run, from checkpoint to a folder that `transformers` loads."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny
from programs import program

from agentr1_jax.errors import UserError
from agentr1_jax.policy import weights
from agentr1_jax.policy.params import join, merge_adapters
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.checkpoint import Checkpoints
from agentr1_jax.runtime.run_folder import FORMAT, RunFolder
from agentr1_jax.text.tokenizer import load_tokenizer
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build
from configs import quickstart
from experiments.setup import make_task, read_run, read_settings

export_hf = program("export_hf")


def make_run(folder, **changes):
    """A run that was stopped before its first update; its policy, and all parameters of its decoder."""
    config = quickstart.get_config()
    small = {"policy.width": 32, "policy.layers": 2, "policy.hidden": 64, "policy.head_dim": 8, "tokenizer.texts": 400}
    config.update_from_flattened_dict({**small, **changes, "run_dir": str(folder)})
    settings = read_settings(config)
    tokenizer = build.make_tokenizer(settings, make_task(settings, ToolMetrics()), resumes=False)
    policy, mesh = build.make_policy(settings, tokenizer), tiny.mesh()
    state = build.make_state_builder(settings, policy, mesh).init()
    # Fresh adapters change nothing.
    state = dataclasses.replace(state, params=jax.tree.map(lambda x: x + 0.125, state.params))
    RunFolder(str(folder)).write_config(configs.resolve(config))
    checkpoints = Checkpoints(folder, 1)
    checkpoints.save(3, state, {})
    checkpoints.close()
    trained = {"decoder": state.params["decoder"]}
    return policy, join(trained, build.make_frozen(settings, policy, mesh))["decoder"]


def read_weights(folder):
    config = weights.read_config(folder)
    return config, weights.load(folder, config, lambda tree: shardings(tree, tiny.mesh()))


def test_a_run_is_exported_bit_for_bit_from_wherever_it_lies(tmp_path):
    policy, decoder = make_run(tmp_path / "made")
    (tmp_path / "made").rename(tmp_path / "run")
    export_hf.export(str(tmp_path / "run"), str(tmp_path / "out"))
    config, params = read_weights(tmp_path / "out")
    assert config == policy
    jax.tree.map(np.testing.assert_array_equal, params, decoder)
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    assert tokenizer.vocab_size == load_tokenizer(str(tmp_path / "run" / "tokenizer.model")).vocab_size
    record = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert record == {"eos_token_id": tokenizer.stop_id, "pad_token_id": tokenizer.pad_id}
    # The optimizer's state may have another structure, as in runs from before it had one for each part.
    changed = read_run(str(tmp_path / "run"))
    assert changed.optimizer.name != "sgd"
    with changed.unlocked():
        changed.optimizer.name, changed.run_dir = "sgd", str(tmp_path / "run")
    RunFolder(str(tmp_path / "run")).write_config(configs.resolve(changed))
    export_hf.export(str(tmp_path / "run"), str(tmp_path / "again"))
    jax.tree.map(np.testing.assert_array_equal, read_weights(tmp_path / "again")[1], decoder)
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "run" / "elsewhere")
    with pytest.raises(UserError, match=r"run: has no checkpoint yet"):
        export_hf.export(str(tmp_path / "run"), str(tmp_path / "none"))


def test_adapters_are_merged_and_dtypes_cast(tmp_path):
    lora = {
        "policy.lora.rank": 2,
        "critic": "none",
        "credit.name": "grpo",
        "credit.args.lam": None,
        "optimizer.name": "adamw",
    }
    policy, decoder = make_run(tmp_path / "run", **lora)
    assert "lora_a" in decoder["layers"]["gate"]
    export_hf.export(str(tmp_path / "run"), str(tmp_path / "out"), "bfloat16")
    _, params = read_weights(tmp_path / "out")
    expected = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), merge_adapters(policy, decoder))
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_mistakes_are_told(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(UserError, match=r"full: exists and is not empty"):
        export_hf.export("run", str(tmp_path / "full"))
    with pytest.raises(UserError, match=r"nothing: no run \(it has no config.json\)"):
        export_hf.export(str(tmp_path / "nothing"), str(tmp_path / "out"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"format": FORMAT, "algo": 1}))
    with pytest.raises(UserError, match=r"config.json: not a config of this version"):
        export_hf.export(str(tmp_path / "run"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_hugging_face_tokenizer_goes_along_whole(tmp_path, data_dir):
    given = load_tokenizer(str(data_dir / "tokenizers" / "minimind-6400"))
    export_hf.write_tokenizer(str(tmp_path / "out"), given)
    back = load_tokenizer(str(tmp_path / "out"))
    messages = [{"role": "user", "content": "Who wrote <|im_end|> it?"}]
    assert back.added == given.added and back.stop_id == given.stop_id
    assert back.render_chat(messages) == given.render_chat(messages)
    assert back.encode_data("Wer schrieb es? 2024") == given.encode_data("Wer schrieb es? 2024")


@pytest.mark.parametrize("argv", [["RUN"], ["RUN", "OUT", "MORE"]])
def test_the_command_takes_two_arguments(argv):
    with pytest.raises(UserError, match=r"OUT is missing; the command takes RUN OUT|unexpected argument 'MORE'"):
        configs.parse_flags(["export_hf", *argv], arguments=("RUN", "OUT"))
