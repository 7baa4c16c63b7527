//! Cancelling and watching long work from another thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{Error, Result};

/// A flag that stops the work and a counter that shows how far it is. Shared between the thread that works and the
/// thread that looks on.
#[derive(Debug, Default)]
pub struct Watch {
    cancelled: AtomicBool,
    done: AtomicU64,
    total: AtomicU64,
}

impl Watch {
    /// A watch on which nothing has happened.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the work to stop at its next look.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// [`Error::Interrupted`] once somebody called [`Watch::cancel`].
    pub fn check(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        Ok(())
    }

    /// Declares `units` more units of work (multiply-adds, by habit).
    pub fn plan(&self, units: u64) {
        self.total.fetch_add(units, Ordering::Relaxed);
    }

    /// Reports `units` as done, and looks at the flag.
    pub fn advance(&self, units: u64) -> Result<()> {
        self.done.fetch_add(units, Ordering::Relaxed);
        self.check()
    }

    /// The share of the planned work that is done, between 0 and 1.
    #[must_use]
    pub fn fraction(&self) -> f64 {
        let total = self.total.load(Ordering::Relaxed);
        if total == 0 {
            return 0.0;
        }
        (self.done.load(Ordering::Relaxed) as f64 / total as f64).min(1.0)
    }
}
