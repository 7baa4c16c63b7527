//! Large working memory: on large pages, and with an error when there is none.
//!
//! A Hessian has hundreds of megabytes, each touched once in an order that the kernel cannot foresee. With pages of 4
//! KiB every first touch is a page fault (docs/performance.md shows the cost). Buffers of some megabytes are therefore
//! separate maps with pages of 2 MiB.

use std::ops::{Deref, DerefMut};

use bytemuck::Pod;
use memmap2::MmapMut;
use rayon::iter::IndexedParallelIterator;

use crate::{dims, Error, Result};

/// Below this many bytes the allocator's own memory is used.
const LARGE: usize = 2 << 20;

/// A buffer of fixed length, zeros at first.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    memory: Memory<T>,
    len: usize,
}

#[derive(Debug)]
enum Memory<T> {
    Heap(Vec<T>),
    Mapped(MmapMut),
}

impl<T: Pod> Buffer<T> {
    /// `len` zeros; `what` is named when there is no memory for them.
    pub(crate) fn zeroed(what: &'static str, len: usize) -> Result<Self> {
        let bytes = dims::product(what, len, size_of::<T>())?;
        if bytes < LARGE {
            return Ok(Self { memory: Memory::Heap(zeros(what, len)?), len });
        }
        let map = MmapMut::map_anon(bytes).map_err(|_| Error::OutOfMemory { what, bytes })?;
        // Advice: without it the memory is the same, only slower.
        #[cfg(all(target_os = "linux", not(feature = "small-pages")))]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { memory: Memory::Mapped(map), len })
    }
}

/// A vector of `len` zeros, for results; an error names `what` when there is no memory for it.
pub fn zeros<T: Pod>(what: &'static str, len: usize) -> Result<Vec<T>> {
    let bytes = dims::product(what, len, size_of::<T>())?;
    bytemuck::allocation::try_zeroed_vec(len).map_err(|()| Error::OutOfMemory { what, bytes })
}

/// A vector of a copy of `values`.
pub fn copied<T: Copy>(what: &'static str, values: &[T]) -> Result<Vec<T>> {
    collected(what, values.iter().copied())
}

/// A vector of the values of an iterator of known length: `collect`, with an error where there is no memory for it.
pub fn collected<T>(what: &'static str, values: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>> {
    let mut made = Vec::new();
    reserve(what, &mut made, values.len())?;
    made.extend(values);
    Ok(made)
}

/// As [`collected`], of what threads give.
pub(crate) fn gathered<T: Send>(
    what: &'static str,
    values: impl IndexedParallelIterator<Item = T>,
) -> Result<Vec<T>> {
    let mut made = Vec::new();
    reserve(what, &mut made, values.len())?;
    values.collect_into_vec(&mut made);
    Ok(made)
}

/// Room for `n` entries more, and no others.
pub fn reserve<T>(what: &'static str, to: &mut Vec<T>, n: usize) -> Result<()> {
    let bytes = dims::product(what, n, size_of::<T>())?;
    to.try_reserve_exact(n).map_err(|_| Error::OutOfMemory { what, bytes })
}

/// Appends `values` to `to`.
pub(crate) fn extend<T: Copy>(what: &'static str, to: &mut Vec<T>, values: &[T]) -> Result<()> {
    to.try_reserve(values.len()).map_err(|_| Error::OutOfMemory { what, bytes: size_of_val(values) })?;
    to.extend_from_slice(values);
    Ok(())
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.memory {
            Memory::Heap(values) => values,
            // Cut first: a map's length is a whole number of pages on some systems.
            Memory::Mapped(map) => bytemuck::cast_slice(&map[..self.len * size_of::<T>()]),
        }
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.memory {
            Memory::Heap(values) => values,
            Memory::Mapped(map) => bytemuck::cast_slice_mut(&mut map[..self.len * size_of::<T>()]),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{collected, copied, zeros, Buffer};
    use crate::Error;

    #[test]
    fn buffers_are_zeros_below_and_above_the_size_of_a_map() {
        for len in [0, 5, (2 << 20) / 8 - 1, (3 << 20) / 8 + 5] {
            let mut buffer = Buffer::<f64>::zeroed("a buffer", len).unwrap();
            assert!(buffer.len() == len && buffer.iter().all(|&v| v == 0.0));
            buffer.fill(1.0);
            assert_eq!(buffer.iter().sum::<f64>(), len as f64);
        }
    }

    #[test]
    fn memory_that_is_not_there_is_an_error_with_its_size() {
        const BYTES: usize = 1 << 60;
        let missing = Error::OutOfMemory { what: "a buffer", bytes: BYTES };
        assert_eq!(Buffer::<f64>::zeroed("a buffer", BYTES / 8).unwrap_err(), missing);
        assert_eq!(zeros::<u8>("a buffer", BYTES).unwrap_err(), missing);
        assert!(matches!(zeros::<f64>("a buffer", usize::MAX / 2), Err(Error::TooLarge { .. })));
        assert_eq!(collected("a buffer", 0..BYTES / 8).unwrap_err(), missing);
        assert_eq!(copied("a buffer", &[1_u8, 2]).unwrap(), [1, 2]);
    }
}
