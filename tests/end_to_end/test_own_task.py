"""A person's own task and own model: the class of the documents, and a model that reads text."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import Qwen3Config, Qwen3ForCausalLM

from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "your_environment.md"
TEMPLATE = PAGE.parents[1] / "tests" / "inference" / "chat_templates" / "smollm2.jinja"
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
STEPS = 2


def save_text_model(folder: Path) -> Path:
    """Write Qwen3's architecture with byte-level tokens and SmolLM2's chat template, as
    `policy.source` takes a model.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["1 2 3"], BpeTrainer(vocab_size=256, initial_alphabet=letters, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}'
    )
    _model(tokenizer).save_pretrained(folder)
    return folder


def _model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    end = tokenizer.token_to_id("<|im_end|>")
    shape = Qwen3Config(
        vocab_size=-(-tokenizer.get_vocab_size() // 32) * 32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(shape)


@pytest.mark.timeout(600)
def test_the_lock_of_the_documents_is_trained_on_without_a_script(tmp_path: Path) -> None:
    model, run_dir = save_text_model(tmp_path / "model"), tmp_path / "run"
    source = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "lock.py").write_text(source)
    command = [sys.executable, "-m", "mage_async.launch", "--actors", "1"]
    command += ["--run-dir", str(run_dir), "--set", f"policy.source={model}"]
    command += ["--set", "environment.name=lock:NumberLock", "--set", f"learner.steps={STEPS}"]
    command += ["--set", "evaluation.final_trials=4", "--set", "evaluation.episodes=2"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "of 16 actions were valid" in ended.stdout
    run = RunDirectory(run_dir)
    summary = json.loads(run.summary.read_text())
    assert summary["steps"] == STEPS
    assert summary["logprob_mismatch"]["max_abs"] < 1e-3
    assert [len(line["return_by_episode"]) for line in read_lines(run.metrics)] == [3] * STEPS
    assert json.loads(run.evaluation.read_text())["version"] == STEPS
