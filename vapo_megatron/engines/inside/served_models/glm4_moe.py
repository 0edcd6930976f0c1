from sglang.srt.models.glm4_moe import EntryClass

__all__ = ["EntryClass"]
