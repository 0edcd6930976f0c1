"""Chat templates that treat earlier turns as those of well-known families do, in our own words."""

_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, "
    "'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}"
)
_TOOLS = (
    "{% if tools %}{{ SYSTEM }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}END{% endif %}"
)
_HEAD = "{{ '<|im_start|>' + m.role + '\\n' }}"
_ANSWERS = "<tool_response>\n{{ m.content }}\n</tool_response>\n"
# Consecutive results of tools are one message of a user.
_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\n{% endif %}"
    + _ANSWERS
    + "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_START = _TOOLS.replace("{{ SYSTEM }}", "<|im_start|>system\n").replace("END", "<|im_end|>\n")
_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_LAST_QUESTION = (
    "{% set ns = namespace(last=messages|length - 1, looking=true) %}{% for m in messages[::-1] %}"
    "{% set index = messages|length - 1 - loop.index0 %}{% if ns.looking and m.role == 'user' and "
    "not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.looking = false %}{% set ns.last = index %}{% endif %}{% endfor %}"
)
_REASONING = (
    "{% set content = m.content %}{% set reasoning = '' %}{% if m.reasoning_content is string %}"
    "{% set reasoning = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1]"
    ".lstrip('\\n') %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)

CHAT_TEMPLATES = {
    # Qwen2.5's
    "repeats": (
        _START
        + "{% for m in messages %}{% if m.role == 'tool' %}"
        + _RESULTS
        + "{% else %}"
        + _HEAD
        + "{{ m.content }}"
        + _CALLS
        + "<|im_end|>\n{% endif %}{% endfor %}"
        + _END
    ),
    # Qwen3's: reasoning stays after the last question
    "until a question": (
        _START
        + _LAST_QUESTION
        + "{% for m in messages %}{% if m.role == 'tool' %}"
        + _RESULTS
        + "{% elif m.role == 'assistant' %}"
        + _REASONING
        + _HEAD
        + "{% if loop.index0 > ns.last and (loop.last or reasoning) %}<think>\n"
        "{{ reasoning.strip('\\n') }}\n</think>\n\n{{ content.lstrip('\\n') }}"
        "{% else %}{{ content }}{% endif %}"
        + _CALLS
        + "<|im_end|>\n{% else %}"
        + _HEAD
        + "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + _END
    ),
    # GLM's: roles are marks, and a word in a question turns reasoning off
    "without ends": (
        _TOOLS.replace("{{ SYSTEM }}", "[gMASK]<sop><|system|>\n").replace("END", "")
        + "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "{% if m.role == 'user' %}<|user|>\n{{ m.content }}{{ '/nothink' if not "
        "m.content.endswith('/nothink') and enable_thinking is false else '' }}"
        "{% elif m.role == 'assistant' %}<|assistant|>"
        + _REASONING
        + "{% if loop.index0 > ns.last and reasoning %}\n<think>{{ reasoning.strip() }}</think>"
        "{% else %}\n<think></think>{% endif %}{% if content.strip() %}\n{{ content.strip() }}"
        "{% endif %}"
        + _CALLS
        + "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' "
        "%}<|observation|>{% endif %}\n"
        + _ANSWERS
        + "{% else %}<|system|>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    # DeepSeek-R1's: no reasoning is repeated, and the prompt begins it
    "drops reasoning": (
        _START
        + "{% for m in messages %}{% if m.role == 'tool' %}"
        + _RESULTS
        + "{% else %}"
        + _HEAD
        + "{% if m.role == 'assistant' and '</think>' in m.content %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
        + _CALLS
        + "<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    # gpt-oss's: reasoning stays until an answer without calls follows
    "until an answer": (
        _START
        + "{% for m in messages %}{% if m.role == 'tool' %}"
        + _RESULTS
        + "{% elif m.role == 'assistant' %}{% set later = namespace(answer=false) %}"
        "{% for other in messages[loop.index:] %}{% if other.role == 'assistant' and not "
        "other.tool_calls %}{% set later.answer = true %}{% endif %}{% endfor %}"
        + _HEAD
        + "{% if later.answer %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}"
        "{% endif %}"
        + _CALLS
        + "<|im_end|>\n{% else %}"
        + _HEAD
        + "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + _END
    ),
    # Llama 3.1's: one call a turn, and tools before the first question
    "one call": (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls|length != 1 %}"
        "{{ raise_exception('one call') }}{% endif %}"
        + _HEAD
        + "{% if m.role == 'user' and tools and not seen %}{% set seen = true %}"
        "{{ tools | tojson }}{% endif %}{{ m.content | trim }}"
        + _CALLS
        + "<|im_end|>\n{% endfor %}"
        + _END
    ),
    # Mistral's: ids of nine, and tools before the last question
    "tools last": (
        "{% set questions = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}{% if m.tool_call_id and m.tool_call_id|length != 9 %}"
        "{{ raise_exception('id') }}{% endif %}{% if tools and m == questions[-1] %}"
        "<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        + _HEAD
        + "{{ m.content }}"
        + _CALLS
        + "<|im_end|>\n{% endfor %}"
        + _END
    ),
    # It counts, which short conversations do not show
    "counts": (
        _START
        + "{% for m in messages %}"
        + _HEAD
        + "{{ m.content if loop.revindex < 20 else '...' }}"
        + _CALLS
        + "<|im_end|>\n{% endfor %}"
        + _END
    ),
}
