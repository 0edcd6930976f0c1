from sglang.srt.models.mistral import EntryClass

__all__ = ["EntryClass"]
