"""The model classes that this project trains, named for SGLang's SGLANG_EXTERNAL_MODEL_PACKAGE.

SGLang otherwise imports all of its two hundred model files at every start, which takes longer than everything else a
server of a small model does. It still imports them when asked for an architecture that is not here.
"""
