//! One buffer that several threads write, each its own elements.
//!
//! The threads of a product write different columns of the same rows; the threads of the runner read each other's
//! results after a barrier. Slices can express neither, so this module alone hands a buffer to several threads. The
//! lifetime keeps the buffer borrowed, and every access is checked against its length. The rest is the contract of two
//! `unsafe` functions: which thread writes which elements, and when.
#![allow(unsafe_code)] // each block says what makes it sound

use std::marker::PhantomData;
use std::ops::Range;

/// A buffer, borrowed for as long as this value lives.
#[derive(Debug)]
pub(crate) struct Disjoint<'a, T> {
    at: *mut T,
    len: usize,
    buffer: PhantomData<&'a mut [T]>,
}

// SAFETY: a shared value gives access through `write` and `read` only. Their callers promise that no thread writes an
// element while another one accesses it. `write` moves a `T` between threads (`Send`), and `read` gives several threads
// a `&T` (`Sync`).
unsafe impl<T: Send + Sync> Sync for Disjoint<'_, T> {}

impl<'a, T: Copy> Disjoint<'a, T> {
    /// Over a buffer, which nobody else can touch meanwhile.
    pub(crate) fn over(buffer: &'a mut [T]) -> Self {
        Self { at: buffer.as_mut_ptr(), len: buffer.len(), buffer: PhantomData }
    }

    /// Writes `values` from `first` on.
    ///
    /// # Panics
    /// If they are not all within the buffer.
    ///
    /// # Safety
    /// Between the last point at which this thread and the others waited for each other and the next one, no other thread
    /// writes or reads these numbers, and nobody has a slice of them.
    pub(crate) unsafe fn write(&self, first: usize, values: &[T]) {
        assert!(first <= self.len && values.len() <= self.len - first);
        // SAFETY: within the buffer, as was just asserted; alone with these numbers by the caller's promise. So `values`, which
        // can be read, does not overlap them.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.at.add(first), values.len()) }
    }

    /// Numbers that were written before.
    ///
    /// # Panics
    /// If they are not all within the buffer.
    ///
    /// # Safety
    /// As long as the slice is used, no thread writes these numbers, and all that were written by others were written
    /// before a point at which this thread and the others waited for each other.
    pub(crate) unsafe fn read(&self, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the buffer by the assertion; not written meanwhile by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.at.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::Disjoint;

    #[test]
    fn threads_write_columns_of_their_own() {
        let mut numbers = [0; 6];
        let shared = Disjoint::over(&mut numbers);
        std::thread::scope(|scope| {
            for column in 0..3 {
                let shared = &shared;
                scope.spawn(move || {
                    for row in 0..2 {
                        // SAFETY: each thread has one column.
                        unsafe { shared.write(row * 3 + column, &[row * 10 + column]) };
                    }
                });
            }
        });
        // SAFETY: all threads have ended.
        assert_eq!(unsafe { shared.read(1..5) }, [1, 2, 10, 11]);
        assert_eq!(numbers, [0, 1, 2, 10, 11, 12]);
    }

    #[test]
    fn what_lies_outside_is_refused_and_sizes_do_not_wrap() {
        let outside = |first: usize, n: usize| {
            let run = || {
                let (mut numbers, values) = ([0_u8; 4], [1; 8]);
                // SAFETY: there is one thread.
                unsafe { Disjoint::over(&mut numbers).write(first, &values[..n]) };
            };
            std::panic::catch_unwind(run).is_err()
        };
        assert!(!outside(0, 4) && !outside(4, 0));
        assert!(outside(3, 2) && outside(5, 0) && outside(usize::MAX, 2) && outside(usize::MAX - 1, 8));
    }
}
