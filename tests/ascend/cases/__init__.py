"""One module per op folder of dsv4_npu/ops; each has ``cases()``, and ``NOT_CARRIED`` when a proof cannot be had."""
