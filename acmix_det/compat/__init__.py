"""What MMDetection 3.3 needs to run with current packages. All of it happens on `import acmix_det`."""
from .dependencies import check_dependencies


def install():
    """Apply every adjustment of the host. Calling it again changes nothing.

    The imports are local because these modules need the packages that `check_dependencies` checks.
    """
    from .checkpoint_loader import register_local_loader
    from .checkpoint_saver import enable_safe_saving
    from .cpu_training import enable_cpu_training
    from .downloads import explain_failed_downloads
    from .flop_counter import register_flop_handle
    from .mmcv_ext import provide_mmcv_ext
    from .package_lookup import register_config_package
    from .sharded_training import enable_sharded_training

    provide_mmcv_ext()
    register_local_loader()
    enable_safe_saving()
    explain_failed_downloads()
    register_config_package()
    enable_cpu_training()
    enable_sharded_training()
    register_flop_handle()

    from .coco_dataset import enable_data_checks  # mmdet.datasets needs what provide_mmcv_ext puts in place
    enable_data_checks()


__all__ = ['check_dependencies', 'install']
