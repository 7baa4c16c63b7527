//! A value per process: a forked child makes its own.
//!
//! A forked child has a copy of its parent's memory, but only one thread. It inherits the data of the parent's pools
//! without their threads, and a lock held by another thread stays held. So a child must not share anything that waits
//! for a thread. Such values are stored under the number of the process that made them, and found without a lock.
#![allow(unsafe_code)] // a pointer to a value that is never freed

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A value that each process makes once.
pub struct PerProcess<T: 'static> {
    newest: AtomicPtr<Made<T>>,
}

struct Made<T> {
    process: u32,
    value: T,
}

impl<T: Default + Send + Sync> PerProcess<T> {
    /// Before anything is made.
    #[must_use]
    pub const fn unmade() -> Self {
        Self { newest: AtomicPtr::new(null_mut()) }
    }

    /// The value of this process, made on first use. A parent's value is left alone: dropping it could wait for threads
    /// that do not exist here.
    pub fn get(&self) -> &'static T {
        self.of(std::process::id())
    }

    fn of(&self, process: u32) -> &'static T {
        let mut found = self.newest.load(Ordering::Acquire);
        loop {
            // SAFETY: the pointer is null, or one of a box that was leaked below, whole before it was stored with `Release`.
            if let Some(made) = unsafe { found.as_ref::<'static>() }.filter(|made| made.process == process) {
                return &made.value;
            }
            let made = Box::into_raw(Box::new(Made { process, value: T::default() }));
            match self.newest.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: leaked just now, and never freed.
                Ok(_) => return unsafe { &(*made).value },
                Err(other) => {
                    // SAFETY: it was not stored, so nobody else has it.
                    drop(unsafe { Box::from_raw(made) });
                    found = other;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::PerProcess;
    use std::sync::Mutex;

    #[test]
    fn each_process_has_one_value_and_no_lock_of_another() {
        static VALUE: PerProcess<Mutex<Vec<u32>>> = PerProcess::unmade();
        let parents = VALUE.of(1);
        assert!(std::ptr::eq(parents, VALUE.of(1)));
        let held = parents.lock();
        let childs = VALUE.of(2);
        assert!(!std::ptr::eq(parents, childs) && childs.try_lock().is_ok());
        drop(held);
    }

    #[test]
    fn threads_of_a_process_get_the_same_value() {
        static VALUE: PerProcess<Mutex<Vec<u32>>> = PerProcess::unmade();
        std::thread::scope(|scope| {
            for i in 0..8 {
                scope.spawn(move || {
                    if let Ok(mut list) = VALUE.get().lock() {
                        list.push(i);
                    }
                });
            }
        });
        assert!(VALUE.get().lock().is_ok_and(|list| list.len() == 8));
    }
}
