"""What outlives a step (`SlotState`) and what a step is made of (`InputBatch`), apart."""
