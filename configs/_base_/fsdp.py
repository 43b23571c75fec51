# Shards parameters, gradients and optimizer over the processes, block by
# block; a second base for any config of this package (docs/scaling.md).
runner_type = 'FlexibleRunner'
# a test takes its weights from the checkpoint, none from init_cfg
init_weights_for_test_or_val = False
strategy = dict(
    type='FSDPStrategy',
    # one checkpoint file, as of any other training
    state_dict_cfg='full',
    model_wrapper=dict(
        type='MMFullyShardedDataParallel',
        use_orig_params=True,
        auto_wrap_policy=dict(type='wrap_blocks')))
