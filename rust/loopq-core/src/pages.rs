//! Large working memory on large pages.
//!
//! A Hessian is hundreds of megabytes that are touched once each in an order the kernel cannot foresee. With pages of
//! 4 KiB every first touch is a fault of its own; on a virtual machine they took 40 % of a Hessian of 8192 rows
//! (docs/performance.md). Anonymous maps may be asked for on 2 MiB pages, and come zeroed.

use std::ops::{Deref, DerefMut};

use bytemuck::Pod;
use memmap2::MmapMut;

/// Below this many bytes the allocator's own memory is used.
const LARGE: usize = 2 << 20;

/// A zeroed buffer of fixed length.
#[derive(Debug)]
pub(crate) struct Pages<T> {
    memory: Memory<T>,
    len: usize,
}

#[derive(Debug)]
enum Memory<T> {
    Heap(Vec<T>),
    Mapped(MmapMut),
}

impl<T: Pod> Pages<T> {
    /// `len` zeros. Where the system has no such map to give, the allocator is asked instead.
    pub(crate) fn zeroed(len: usize) -> Self {
        let bytes = len.saturating_mul(size_of::<T>());
        let map = if bytes < LARGE { None } else { MmapMut::map_anon(bytes).ok() };
        let memory = map.map_or_else(
            || Memory::Heap(vec![T::zeroed(); len]),
            |map| {
                // Advice: without it the memory is the same, only slower.
                #[cfg(target_os = "linux")]
                let _ = map.advise(memmap2::Advice::HugePage);
                Memory::Mapped(map)
            },
        );
        Self { memory, len }
    }
}

impl<T: Pod> Deref for Pages<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.memory {
            Memory::Heap(values) => values,
            Memory::Mapped(map) => &bytemuck::cast_slice(map)[..self.len],
        }
    }
}

impl<T: Pod> DerefMut for Pages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.memory {
            Memory::Heap(values) => values,
            Memory::Mapped(map) => &mut bytemuck::cast_slice_mut(map)[..self.len],
        }
    }
}

impl<T: Pod> Clone for Pages<T> {
    fn clone(&self) -> Self {
        let mut made = Self::zeroed(self.len);
        made.copy_from_slice(self);
        made
    }
}
