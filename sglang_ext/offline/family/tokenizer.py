"""The family's tokenizer: byte-level BPE in which every word of the tasks is one token, and a ChatML template."""

from typing import TYPE_CHECKING

from sglang_ext.offline.family.tasks import INSTRUCTIONS, SYSTEM_PROMPT
from sglang_ext.offline.family.vocabulary import MANY_THINGS, QUESTIONS, STATEMENTS, content_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

MAX_POSITIONS = 8192
_VOCABULARY_LIMIT = 1100
_WORD_PATTERN = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Train the tokenizer. The result depends on nothing but the words of the tasks."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_LIMIT,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus() * 2, trainer)  # the trainer leaves some words that it sees once in pieces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _corpus() -> list[str]:
    """Every word of the tasks, so that the trainer merges each of them down to one token."""
    return [
        SYSTEM_PROMPT,
        *INSTRUCTIONS.values(),
        *(f" {question.format(name='', names='')}" for question in (*QUESTIONS.values(), MANY_THINGS)),
        *(f" {statement.format(name='', value='')}." for statement in STATEMENTS.values()),
        *(f" {word}" for word in content_words()),
        *("system\n", "user\n", "assistant\n", "Text:", "Question:", "Answer:", "Steps:", " Answer:", " + = , ."),
    ]
