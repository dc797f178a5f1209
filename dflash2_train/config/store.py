"""How captured states are stored, checked and opened."""

from __future__ import annotations

from dataclasses import dataclass

from dflash2_train.config.rules import require

STORE_DTYPES = ("bfloat16", "float8_e4m3")


@dataclass(kw_only=True)
class StoreConfig:
    """How captured states are stored, checked and opened."""

    dtype: str = "bfloat16"  # bfloat16 | float8_e4m3 (half the bytes; one factor a token and tap)
    verify_share: float = 1.0  # share of the shards that stage=verify reads, drawn by verify_seed
    verify_seed: int = 0  # of that draw; another one reads other shards
    quarantine: bool = False  # stage=verify moves faulty shards aside, and stage=capture makes them again
    max_damaged: int = 2  # faulty shards that quarantine takes without asking further; see max_damaged_share
    max_damaged_share: float = 0.01  # of the shards read, if that is more than max_damaged; beyond it nothing is moved

    def check(self) -> None:
        name = "data.store"
        require(self.dtype in STORE_DTYPES, f"{name}.dtype", self.dtype, f"must be one of {STORE_DTYPES}", "Pick one.")
        require(0 < self.verify_share <= 1, f"{name}.verify_share", self.verify_share, "must lie in (0, 1]", "Use 1.0.")
        require(self.max_damaged >= 0, f"{name}.max_damaged", self.max_damaged, "must not be negative", "Use 2.")
        require(
            0 <= self.max_damaged_share <= 1,
            f"{name}.max_damaged_share",
            self.max_damaged_share,
            "must lie in [0, 1]",
            "Use 0.01.",
        )
