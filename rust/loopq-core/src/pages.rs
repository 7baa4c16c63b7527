//! Large working memory: on large pages, and kept for the next one who needs it.
//!
//! A Hessian is hundreds of megabytes that are touched once each in an order the kernel cannot foresee. With pages of
//! 4 KiB every first touch is a fault of its own; on a virtual machine they took 40 % of a Hessian of 8192 rows, and
//! with pages of 2 MiB still 16 %, where the machine below had taken the free memory back (docs/performance.md). Maps
//! that are given back are therefore kept and handed out again. Their pages are marked as free to take: under pressure
//! the kernel takes them at once, so what is kept costs nobody else anything.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

use bytemuck::Pod;
use memmap2::MmapMut;
use rayon::prelude::*;

#[cfg(target_os = "linux")]
use crate::dump::mark_free;

/// Below this many bytes the allocator's own memory is used.
const LARGE: usize = 2 << 20;

/// Maps that are kept at most, the oldest let go first.
const KEPT: usize = 64;

/// Maps that nobody uses. What they hold is not defined: some pages what was last written, others zeros.
static SPARE: Mutex<Vec<MmapMut>> = Mutex::new(Vec::new());

/// A buffer of fixed length.
#[derive(Debug)]
pub(crate) struct Pages<T> {
    memory: Memory<T>,
    len: usize,
}

#[derive(Debug)]
enum Memory<T> {
    Heap(Vec<T>),
    /// `None` only while it is dropped.
    Mapped(Option<MmapMut>),
}

impl<T: Pod> Pages<T> {
    /// `len` values of whatever a former user left. Where the system has no such map to give, the allocator is asked.
    pub(crate) fn room(len: usize) -> Self {
        Self::take(len).0
    }

    /// `len` zeros; used memory is cleared by the threads of the pool that this is called in.
    pub(crate) fn zeroed(len: usize) -> Self
    where
        T: Send,
    {
        let (mut made, used) = Self::take(len);
        if used {
            made.par_chunks_mut(LARGE).for_each(|part| part.fill(T::zeroed()));
        }
        made
    }

    /// The buffer, and whether somebody used it before: if not, it is all zeros.
    fn take(len: usize) -> (Self, bool) {
        let bytes = len.saturating_mul(size_of::<T>());
        if bytes >= LARGE {
            if let Some(map) = spare(bytes) {
                return (Self { memory: Memory::Mapped(Some(map)), len }, true);
            }
            if let Ok(map) = MmapMut::map_anon(bytes) {
                // Advice: without it the memory is the same, only slower.
                #[cfg(target_os = "linux")]
                let _ = map.advise(memmap2::Advice::HugePage);
                return (Self { memory: Memory::Mapped(Some(map)), len }, false);
            }
        }
        (Self { memory: Memory::Heap(vec![T::zeroed(); len]), len }, false)
    }
}

/// The smallest spare map of that many bytes, unless it is more than twice as large.
fn spare(bytes: usize) -> Option<MmapMut> {
    let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
    let fits = spare.iter().enumerate().filter(|(_, m)| (bytes..=2 * bytes).contains(&m.len()));
    let (at, _) = fits.min_by_key(|(_, m)| m.len())?;
    Some(spare.remove(at))
}

impl<T> Drop for Pages<T> {
    fn drop(&mut self) {
        if let Memory::Mapped(map) = &mut self.memory {
            if let Some(map) = map.take() {
                keep(map);
            }
        }
    }
}

/// Keeps a map for later; on systems that cannot take its pages under pressure, it is let go.
fn keep(map: MmapMut) {
    #[cfg(target_os = "linux")]
    {
        // Who gets it from `SPARE` takes its contents as undefined: `zeroed` overwrites them all, `room` promises nothing.
        if mark_free(&map) {
            let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
            if spare.len() == KEPT {
                drop(spare.remove(0));
            }
            spare.push(map);
        }
    }
    #[cfg(not(target_os = "linux"))]
    drop(map);
}

impl<T: Pod> Deref for Pages<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.memory {
            Memory::Heap(values) => values,
            // Cut first: a map that another type has left need not be a whole number of values long.
            Memory::Mapped(map) => {
                map.as_ref().map_or(&[], |map| bytemuck::cast_slice(&map[..self.len * size_of::<T>()]))
            }
        }
    }
}

impl<T: Pod> DerefMut for Pages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.memory {
            Memory::Heap(values) => values,
            Memory::Mapped(map) => map
                .as_mut()
                .map_or(&mut [], |map| bytemuck::cast_slice_mut(&mut map[..self.len * size_of::<T>()])),
        }
    }
}

impl<T: Pod> Clone for Pages<T> {
    fn clone(&self) -> Self {
        let mut made = Self::room(self.len);
        made.copy_from_slice(self);
        made
    }
}

#[cfg(test)]
mod tests {
    use super::Pages;

    #[test]
    fn used_memory_comes_back_as_zeros() {
        const N: usize = (3 << 20) / 4 + 5;
        for round in 0..3 {
            let mut first = Pages::<u32>::zeroed(N);
            let mut second = Pages::<u32>::zeroed(N - round);
            assert!(first.iter().chain(&*second).all(|&v| v == 0), "round {round}");
            first.fill(u32::MAX);
            second.fill(7);
            assert_eq!(first.clone()[N - 1], u32::MAX);
        }
        assert_eq!(Pages::<u32>::room(N).len(), N);
        // What was 4 N bytes, no whole number of 8, serves as well for doubles.
        let doubles = Pages::<f64>::zeroed(N / 2);
        assert!(doubles.len() == N / 2 && doubles.iter().all(|&v| v == 0.0));
    }
}
