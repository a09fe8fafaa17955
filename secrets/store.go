package secrets

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
)

// Store is a keyring that follows its secrets: what is mounted anew is used without a restart. A secret that is broken or
// cannot be read for a moment keeps the credentials that it had; one that is gone loses them. It may be used from many
// goroutines.
type Store struct {
	loader    Loader
	providers *Providers
	keyring   atomic.Pointer[Keyring]

	generation atomic.Uint64

	mu   sync.Mutex // held by Refresh
	good map[string][]entry
}

// NewStore returns a store of the loader's secrets, empty until the first Refresh, and of the credentials that providers
// give, nil for none.
func NewStore(l Loader, providers *Providers) *Store {
	s := &Store{loader: l, providers: providers}
	s.keyring.Store(newKeyring(nil))
	return s
}

// Lookup returns the credentials of the current Keyring and then those of the providers, as the kubelet does.
func (s *Store) Lookup(ctx context.Context, repository string) []Credential {
	return append(s.keyring.Load().Lookup(repository), s.providers.Lookup(ctx, repository)...)
}

// LookAgain is for a login that was refused: it reads the secrets again and has the providers asked again. It returns
// whether Lookup may give something else than at the given generation.
func (s *Store) LookAgain(generation uint64) bool {
	s.Refresh()
	return s.providers.Forget() || s.Generation() != generation
}

// NearMisses is that of the current Keyring.
func (s *Store) NearMisses(repository string) []NearMiss {
	return s.keyring.Load().NearMisses(repository)
}

// Generation is another number after each change of a credential.
func (s *Store) Generation() uint64 { return s.generation.Load() }

// Refresh reads the secrets again and returns all that is wrong now.
func (s *Store) Refresh() []Problem {
	s.mu.Lock()
	defer s.mu.Unlock()
	keyring, problems, good := s.loader.load(s.good)
	s.good = good
	old := s.keyring.Swap(keyring)
	same := func(a, b entry) bool { return a.key == b.key && a.credential == b.credential }
	if !slices.EqualFunc(old.entries, keyring.entries, same) {
		s.generation.Add(1)
	}
	return problems
}

const (
	// pollEvery is the time after which the secrets are read without an event: inotify can lose some, and knows nothing of
	// some file systems.
	pollEvery = 30 * time.Second
	// settle is how long there must be no further event: a swap makes several.
	settle = 100 * time.Millisecond
)

// Watch refreshes the store whenever the mounted files change, and calls changed when a credential has. It returns when
// the context ends. Folders are watched, not files: the kubelet swaps a link in the folder, and a watch of the file
// would die with the old one.
func (s *Store) Watch(ctx context.Context, changed func()) {
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	watcher, err := fsnotify.NewWatcher()
	if err != nil { // no inotify instance left: polling it is
		watcher = &fsnotify.Watcher{}
	} else {
		defer watcher.Close()
	}
	for seen := s.Generation(); ; {
		// In this order: what changes after the look at it makes an event.
		s.follow(watcher)
		s.Refresh()
		if now := s.Generation(); now != seen {
			seen = now
			changed()
		}
		select {
		case <-ctx.Done():
			return
		case <-poll.C:
		case <-watcher.Errors: // an overflow: something has happened
		case <-watcher.Events:
			if !calm(ctx, watcher) {
				return
			}
		}
	}
}

// follow watches the directories and the folders in them as they are now. Adding one that is watched already does
// nothing; one that was replaced is watched anew.
func (s *Store) follow(watcher *fsnotify.Watcher) {
	if watcher.Events == nil {
		return
	}
	for _, dir := range s.loader.Dirs {
		_ = watcher.Add(dir) // it may not be there yet: then polling finds it
		found, _ := readStable(dir, list)
		for _, folder := range found.folders {
			_ = watcher.Add(dir + "/" + folder)
		}
	}
}

// calm waits until no event has come for a moment, but not for ever. It returns false when the context ends.
func calm(ctx context.Context, watcher *fsnotify.Watcher) bool {
	latest := time.After(10 * settle)
	for {
		select {
		case <-ctx.Done():
			return false
		case <-watcher.Events:
		case <-latest:
			return true
		case <-time.After(settle):
			return true
		}
	}
}
