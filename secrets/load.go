package secrets

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	// maxFileSize is the limit of Kubernetes for a whole secret.
	maxFileSize = 1 << 20
	// maxReads and readPause bound the retries of a secret that is swapped while it is read. A swap is one rename, so
	// a second read nearly always succeeds.
	maxReads  = 10
	readPause = time.Millisecond
	// maxNames is how many names a problem lists.
	maxNames = 10
)

var (
	errChanging   = errors.New("kept changing while it was read")
	errNotRegular = errors.New("not a regular file")
	errTooLarge   = errors.New("larger than 1 MiB")
)

// Loader says which secrets are read and how.
type Loader struct {
	// Dirs are the secrets directories.
	Dirs []string
	// Registries names, by secret, the registry of credentials that do not say it themselves: the files username and
	// password of a kubernetes.io/basic-auth secret, and the key file of a Google service account. It is a key as in
	// `auths`.
	Registries map[string]string
	// StrictPaths has the path of a key match whole segments, so that r.io/team is not for r.io/team2. The kubelet
	// matches the path as text.
	StrictPaths bool
}

// Load reads the secrets of the directories with all else as the kubelet has it.
func Load(dirs ...string) (*Keyring, []Problem) { return Loader{Dirs: dirs}.Load() }

// Load reads all secrets of the directories into a keyring. A directory holds one folder for each secret, which is named
// after it, or the files of one secret, which is then named after the directory. Folders may be mounts as the kubelet
// makes them (`KEY -> ..data/KEY`, `..data -> ..TIMESTAMP`), plain folders or links to folders; what is read of them is
// `.dockerconfigjson`, `.dockercfg`, `*.json`, and where Registries has the secret, `username` with `password`.
//
// A pod has an order of its pull secrets, files have none. Here it is: directories in the order given; in each, first
// the files directly in it, then its folders sorted by name.
//
// Whatever is wrong is in the problems and stops nothing else: a bad entry costs that entry, a bad file that file. The
// keyring is never nil, and empty where nothing could be read.
func (from Loader) Load() (*Keyring, []Problem) {
	keyring, problems, _ := from.load(nil)
	return keyring, problems
}

// load reads all secrets. Where a file that gave entries before gives none because it is broken, those of before are
// used. It returns what is good now, by path.
func (from Loader) load(before map[string][]entry) (*Keyring, []Problem, map[string][]entry) {
	l := loader{from: from, before: before, good: map[string][]entry{}, mounts: mountPoints()}
	for _, dir := range from.Dirs {
		l.loadDir(dir)
	}
	keyring := newKeyring(l.entries)
	keyring.strict = from.StrictPaths
	return keyring, l.problems, l.good
}

// loader collects what Load returns.
type loader struct {
	from         Loader
	before, good map[string][]entry // by path
	mounts       map[string]bool
	entries      []entry
	problems     []Problem
}

func (l *loader) loadDir(dir string) {
	found, err := readStable(dir, list)
	if err != nil {
		l.problems = append(l.problems, Problem{File: dir, Message: "secrets directory: " + reason(dir, err)})
		return
	}
	if len(found.files) > 0 {
		l.loadSecret(dirName(dir), dir)
	}
	for _, folder := range found.folders {
		l.loadSecret(folder, filepath.Join(dir, folder))
	}
}

// dirName is the name of a directory that is itself a secret; "." has one too.
func dirName(dir string) string {
	if absolute, err := filepath.Abs(dir); err == nil {
		dir = absolute
	}
	return filepath.Base(dir)
}

func (l *loader) loadSecret(source, folder string) {
	files, err := readStable(folder, readSecret)
	if err != nil {
		if _, gone := os.Lstat(folder); errors.Is(gone, fs.ErrNotExist) {
			return // removed since it was listed
		}
		l.problems = append(l.problems, Problem{Source: source, File: folder, Message: reason(folder, err)})
		for path := range l.before {
			if filepath.Dir(path) == folder {
				l.keep(source, path)
			}
		}
		return
	}
	if len(files.contents) == 0 && len(files.names) > 0 {
		l.problems = append(l.problems, Problem{Source: source, File: folder, Message: noKnownKey(files.names)})
	}
	l.loadBasicAuth(source, folder, files.contents)
	for _, file := range files.contents {
		if file.form != nil {
			l.loadFile(source, filepath.Join(folder, file.name), file)
		}
	}
}

func (l *loader) loadFile(source, path string, file content) {
	if l.mounts[path] {
		l.problems = append(l.problems, Problem{Source: source, File: path,
			Message: "is mounted by itself (subPath): it never changes when the secret does, mount the whole secret"})
	}
	if file.err != nil {
		l.problems = append(l.problems, Problem{Source: source, File: path, Message: reason(path, file.err)})
		l.keep(source, path)
		return
	}
	if registry := l.from.Registries[source]; registry != "" && isServiceAccount(file.data) {
		l.add(source, path, registry, file, Credential{Username: "_json_key", Password: NewSecret(string(file.data))})
		return
	}
	entries, problems := file.form.parse(file.data)
	if !file.form.kubelet && len(entries) > 0 {
		entries, problems = noted(entries, noteForm), append(problems, Problem{Message: warnForm})
	}
	for i := range entries {
		c := &entries[i].credential
		c.Source, c.Modified, c.Content = source, file.modified, file.digest()
	}
	broken := false
	for _, p := range problems {
		broken = broken || p.Key == ""
		p.Source, p.File = source, path
		l.problems = append(l.problems, p)
	}
	if len(entries) == 0 && broken {
		l.keep(source, path)
		return
	}
	l.entries = append(l.entries, entries...)
	l.good[path] = entries
}

// keep goes on with what a file held when it was good.
func (l *loader) keep(source, path string) {
	entries := l.before[path]
	if len(entries) == 0 {
		return
	}
	l.entries = append(l.entries, entries...)
	l.good[path] = entries
	l.problems = append(l.problems, Problem{Source: source, File: path, Message: "what it held before is used until it is mended"})
}

// mountPoints are the paths at which something is mounted, by the fifth field of /proc/self/mountinfo.
func mountPoints() map[string]bool {
	points := map[string]bool{}
	b, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(b)) {
		if fields := strings.Fields(line); len(fields) > 4 {
			points[fields[4]] = true
		}
	}
	return points
}

// loadBasicAuth takes the files username and password of a kubernetes.io/basic-auth secret. They do not say which
// registry they are for, and kip does not send a password to all of them.
func (l *loader) loadBasicAuth(source, folder string, files []content) {
	var fields [2]string
	var last content
	found := false
	for _, file := range files {
		i := slices.Index(basicAuth[:], file.name)
		if i < 0 {
			continue
		}
		found, last = true, file
		path := filepath.Join(folder, file.name)
		if file.err != nil {
			l.problems = append(l.problems, Problem{Source: source, File: path, Message: reason(path, file.err)})
			return
		}
		text, newline := strings.CutSuffix(string(file.data), "\n")
		if newline {
			l.problems = append(l.problems, Problem{Source: source, File: path, Message: "ends in a newline, which is dropped"})
		}
		fields[i] = text
	}
	registry := l.from.Registries[source]
	switch {
	case found && registry == "":
		l.problems = append(l.problems, Problem{Source: source, File: folder,
			Message: "a user and a password without a registry: say for which it is (--secret-registry)"})
	case found:
		l.add(source, folder, registry, last, Credential{Username: fields[0], Password: NewSecret(fields[1])})
	}
}

// add takes a credential whose registry is from the configuration.
func (l *loader) add(source, path, registry string, file content, c Credential) {
	c.Source, c.Modified, c.Content, c.Note = source, file.modified, file.digest(), noteForm
	e, err := newEntry(registry, c)
	if err != nil {
		l.problems = append(l.problems, Problem{Source: source, File: path, Key: displayKey(registry), Message: err.Error()})
		return
	}
	l.entries = append(l.entries, e)
	l.problems = append(l.problems, Problem{Source: source, File: path, Message: warnForm})
}

// basicAuth are the keys of a kubernetes.io/basic-auth secret.
var basicAuth = [...]string{"username", "password"}

// readStable calls read with the real folder behind path, again if the kubelet puts another one in its place meanwhile.
// A swap shows as a file that is gone, but also as one that is missing in the listing, since the old folder is emptied
// before it is removed: so what was read counts only if the folder is still the one in use afterwards.
func readStable[T any](path string, read func(folder string) (T, error)) (T, error) {
	var result T
	var err error
	for try := range maxReads {
		if try > 0 {
			time.Sleep(readPause)
		}
		var before, after string
		if before, err = resolve(path); err == nil {
			if result, err = read(before); err == nil {
				after, err = resolve(path)
			}
		}
		switch {
		case err == nil && before == after:
			return result, nil
		case err == nil:
			err = errChanging
		case !errors.Is(err, fs.ErrNotExist):
			return result, err
		}
	}
	return result, err
}

// resolve returns the real folder that holds the files of path: what `..data` points to, if there is one (kubelet:
// volume/util.AtomicWriter), else path itself, which may be a link.
func resolve(path string) (string, error) {
	data := filepath.Join(path, "..data")
	if _, err := os.Lstat(data); errors.Is(err, fs.ErrNotExist) {
		return filepath.EvalSymlinks(path)
	}
	return filepath.EvalSymlinks(data)
}

// listing is what a folder holds, sorted by name.
type listing struct{ files, folders []string }

// list skips names that begin with "..", which are the kubelet's own, but not other dotfiles: the keys are such. A known
// key counts as a file even if it is none, and a link that leads nowhere as a folder, for the reader to say so.
func list(folder string) (listing, error) {
	var found listing
	names, err := os.ReadDir(folder)
	for _, name := range names {
		if strings.HasPrefix(name.Name(), "..") {
			continue
		}
		info, err := os.Stat(filepath.Join(folder, name.Name()))
		mustBeFile := strings.HasPrefix(name.Name(), ".") && isKnown(name.Name()) // no secret can have such a name
		if mustBeFile || err == nil && !info.IsDir() {
			found.files = append(found.files, name.Name())
		} else {
			found.folders = append(found.folders, name.Name())
		}
	}
	return found, err
}

// formOf returns the form of a file by its name, nil where there is none.
func formOf(name string) *form {
	for i, f := range forms {
		if ok, _ := filepath.Match(f.pattern, name); ok {
			return &forms[i]
		}
	}
	return nil
}

func isKnown(name string) bool { return formOf(name) != nil || slices.Contains(basicAuth[:], name) }

// secretFiles are the files of one secret at one moment.
type secretFiles struct {
	contents []content
	names    []string // what else the folder holds; of use only where there are no contents
}

// content is what a known file holds or why it could not be read.
type content struct {
	name     string
	form     *form // nil for a part of basic-auth
	data     []byte
	modified time.Time
	err      error
}

// digest is the beginning of the content's SHA-256.
func (c content) digest() string { return fmt.Sprintf("%.4x", sha256.Sum256(c.data)) }

// readSecret reads the known files of a folder. It fails only where the whole must be read again or cannot be.
func readSecret(folder string) (secretFiles, error) {
	found, err := list(folder)
	if err != nil {
		return secretFiles{}, err
	}
	var files secretFiles
	for _, name := range found.files {
		if !isKnown(name) {
			continue
		}
		one := content{name: name, form: formOf(name)}
		one.data, one.modified, one.err = readFile(filepath.Join(folder, name))
		if errors.Is(one.err, fs.ErrNotExist) {
			return secretFiles{}, one.err
		}
		files.contents = append(files.contents, one)
	}
	files.names = found.files
	if len(found.files) == 0 {
		files.names = found.folders // a secrets directory one level too high
	}
	return files, nil
}

// readFile reads a regular file of bounded size, with the time it was written, and waits for nothing: a fifo is not
// opened, and if one takes the file's place after the look at it, it opens without a writer and is refused then.
func readFile(path string) ([]byte, time.Time, error) {
	var never time.Time
	info, err := os.Stat(path)
	if err != nil {
		return nil, never, err
	}
	if !info.Mode().IsRegular() {
		return nil, never, errNotRegular
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, never, err
	}
	defer file.Close()
	if info, err = file.Stat(); err != nil {
		return nil, never, err
	}
	if !info.Mode().IsRegular() {
		return nil, never, errNotRegular
	}
	data, err := io.ReadAll(io.LimitReader(file, maxFileSize+1))
	if len(data) > maxFileSize {
		return nil, never, errTooLarge
	}
	return data, info.ModTime(), err
}

// noKnownKey names what is there instead of a key that is read.
func noKnownKey(names []string) string {
	more := ""
	if len(names) > maxNames {
		more = fmt.Sprintf(" and %d more", len(names)-maxNames)
		names = names[:maxNames]
	}
	var known []string
	for _, form := range forms {
		known = append(known, form.pattern)
	}
	return fmt.Sprintf("no pull secret: holds %s%s, read is %s only",
		strings.Join(names, ", "), more, strings.Join(known, ", "))
}

// reason puts an error about path in words. The path that the error itself names is one in a timestamp folder, which
// would make an old fault look new after each rotation.
func reason(path string, err error) string {
	var inPath *fs.PathError
	switch {
	case errors.Is(err, fs.ErrPermission):
		return denied(path)
	case errors.Is(err, fs.ErrNotExist):
		return "does not exist, or a link in it leads nowhere"
	case errors.As(err, &inPath):
		return inPath.Err.Error()
	}
	return err.Error()
}

// denied says who may read path and who kip is. If path cannot be looked at, the folder that forbids it is described.
func denied(path string) string {
	info, err := os.Stat(path)
	for err != nil && path != filepath.Dir(path) {
		path = filepath.Dir(path)
		info, err = os.Stat(path)
	}
	if err != nil {
		return "permission denied"
	}
	return deniedMessage(path, info, os.Geteuid(), os.Getegid())
}

func deniedMessage(path string, info fs.FileInfo, uid, gid int) string {
	owner := "an unknown owner"
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		owner = fmt.Sprintf("uid %d gid %d", stat.Uid, stat.Gid)
	}
	return fmt.Sprintf("permission denied: %s has mode %04o and belongs to %s, kip runs as uid %d gid %d (see fsGroup and defaultMode)",
		path, info.Mode().Perm(), owner, uid, gid)
}
