"""Let mmengine's complexity analysis, and mmdet's get_flops.py with it, count local attention."""
from mmengine.analysis import complexity_analysis, jit_handles

from acmix_det.ops.local_attention import count_macs


def local_attention_macs(inputs, outputs):
    """Multiply-adds of a traced `local_attention`; mmengine calls them FLOPs."""
    query, key, value, rel_pos_h = (jit_handles.get_shape(x) for x in inputs[:4])
    kernel, stride = inputs[5].toIValue(), inputs[7].toIValue()
    return count_macs(query, key, value, rel_pos_h, kernel, stride)


def register_flop_handle():
    """Add the count to mmengine's defaults."""
    complexity_analysis._DEFAULT_SUPPORTED_FLOP_OPS['acmix_det::local_attention'] = local_attention_macs
