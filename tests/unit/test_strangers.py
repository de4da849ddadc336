"""What files of a stranger's cannot do: run code."""

import builtins
import copy
import json
from pathlib import Path

import pytest

from tests.helpers.composing import SMALL, config_of
from trainer.config.schema import TokenizerConfig
from trainer.data.encoding import Encoder
from trainer.tasks.arithmetic import ArithmeticTask
from trainer.tasks.tokenizer import load_tokenizer

TASK = ArithmeticTask(max_operand=9, operations=["plus"], forms="mixed", heldout_fraction=0.1, seed=1)


@pytest.fixture
def agreeing(monkeypatch):
    """Somebody at the terminal who says yes to whatever transformers asks before it runs a folder's code."""
    monkeypatch.setattr(builtins, "input", lambda *_: "y")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer's folder with a module beside it that leaves the file "ran" when it is imported."""
    load_tokenizer(None, task=TASK, vocab_size=320).save_pretrained(tmp_path)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Tokenizer: pass\n"
    (tmp_path / "own.py").write_text(code)
    return tmp_path


@pytest.mark.parametrize("model_type", ["stranger", "llama"])
def test_a_model_folder_runs_no_code_of_its_own(folder, agreeing, model_type):
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": classes}))
    with pytest.raises(ValueError, match=str(folder)):
        config_of(*SMALL, "model=hf", f"model.path={folder}")
    assert not (folder / "ran").exists()


def test_nor_does_a_tokenizers(folder, agreeing):
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {
        "tokenizer_class": "Stranger",
        "auto_map": {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]},
    }
    path.write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "stranger", "auto_map": {"AutoConfig": "own.Config"}}')
    with pytest.raises(ValueError, match=rf"tokenizer.path={folder} has no tokenizer that transformers can load"):
        load_tokenizer(str(folder), task=TASK, vocab_size=320)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append.__globals__ }}",
        "{% for m in messages %}{{ cycler.__init__.__globals__.os.mkdir('ran') }}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_chat_template_reaches_nothing_but_the_messages(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = copy.deepcopy(load_tokenizer(None, task=TASK, vocab_size=320))
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"the chat template in tokenizer\.path=chat fails"):
        Encoder(TokenizerConfig(path="chat", vocab_size=320, chat_template=True, digest=None), tokenizer)
    assert list(tmp_path.iterdir()) == []
