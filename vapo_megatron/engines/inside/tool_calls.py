"""Which of SGLang's parsers reads a tool call, as a server's /parse_function_call does:

    python -m vapo_megatron.engines.inside.tool_calls

Standard input, JSON: the text of a response, the tools of its request, the tokenizer's directory.
The last line of standard output, JSON: the calls [name, arguments] by parser; none for one that
fails.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    written = json.load(sys.stdin)

    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    from vapo_megatron.data.tokenizer import load_tokenizer

    tools = [Tool(**tool) for tool in written["tools"]]
    tokenizer = load_tokenizer(Path(written["tokenizer"]))
    calls: dict[str, list[tuple[str | None, str]]] = {}
    for name in FunctionCallParser.ToolCallParserEnum:
        try:
            parser = FunctionCallParser(tools, name, tokenizer)
            _, found = parser.parse_non_stream(written["text"])
        except Exception:  # of another model's format, which may raise anything
            found = []
        calls[name] = [(call.name, call.parameters) for call in found]
    print(f"\n{json.dumps(calls)}")


if __name__ == "__main__":
    main()
