"""The parts that models are made of. Plain classes: a layer owns its tensors and says where a checkpoint's go."""
