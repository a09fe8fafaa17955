package secrets

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// form is one kind of secret file: the key of the secret, which is the file's name, and how to read it. The entries and
// problems that parse returns have no Source and File yet.
type form struct {
	key   string
	parse func(data []byte) ([]entry, []Problem)
}

// forms are the files that are read, in this order. A new form is one row.
var forms = [...]form{
	{key: ".dockerconfigjson", parse: parseDockerConfigJSON},
}

// dockerConfigJSON are the fields that the kubelet decodes (credentialprovider.DockerConfigJSON), the second one without
// a use for it, so that a wrong type there is seen.
type dockerConfigJSON struct {
	Auths       auths             `json:"auths"`
	HTTPHeaders map[string]string `json:"HttpHeaders"`
}

// auths are the members of an `auths` object in file order. The kubelet decodes them into a map, which leaves the order
// of two keys for one place to chance.
type auths []auth

type auth struct {
	key  string
	body json.RawMessage
}

// authFields are the fields of one entry that the kubelet decodes (credentialprovider.DockerConfigEntry); `email` is
// there to refuse the same wrong types.
type authFields struct {
	Username string `json:"username"`
	Password string `json:"password"`
	Email    string `json:"email"`
	Auth     string `json:"auth"`
}

var errAuthsKind = errors.New(`"auths" is not an object`)

// UnmarshalJSON appends, so that a repeated `auths` adds to the first and null drops what was there, as for a map.
func (a *auths) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		*a = nil
		return nil
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	if token, err := decoder.Token(); err != nil || token != json.Delim('{') {
		return errAuthsKind
	}
	for decoder.More() {
		key, err := decoder.Token()
		if err != nil {
			return err
		}
		next := auth{key: key.(string)} // inside an object the decoder gives no other kind here
		if err := decoder.Decode(&next.body); err != nil {
			return err
		}
		*a = append(*a, next)
	}
	return nil
}

// lastWins drops all but the last of the members with one key.
func (a auths) lastWins() auths {
	seen := make(map[string]bool, len(a))
	var kept auths
	for _, one := range slices.Backward(a) {
		if !seen[one.key] {
			seen[one.key] = true
			kept = append(kept, one)
		}
	}
	slices.Reverse(kept)
	return kept
}

// parseDockerConfigJSON reads a `.dockerconfigjson`: the entries under `auths`, each on its own. The kubelet lets one
// bad entry spoil all secrets of the pod; here it costs itself only.
func parseDockerConfigJSON(data []byte) (entries []entry, problems []Problem) {
	if reason := notJSON(data); reason != "" {
		return nil, []Problem{{Message: reason}}
	}
	var file dockerConfigJSON
	if err := json.Unmarshal(data, &file); err != nil {
		// A wrong type in one place does not keep the decoder from filling in the others.
		problems = append(problems, Problem{Message: jsonReason(err, "file") + "; the kubelet refuses this secret"})
	} else if len(file.Auths) == 0 {
		problems = append(problems, whyEmpty(data)...)
	}
	for _, one := range file.Auths.lastWins() {
		entry, warnings, err := one.parse()
		if err != nil {
			warnings = []string{err.Error() + ": entry dropped"}
		} else {
			entries = append(entries, entry)
		}
		for _, message := range warnings {
			problems = append(problems, Problem{Key: displayKey(one.key), Message: message})
		}
	}
	return entries, problems
}

// notJSON says in a helpful way what is wrong with a file that some tool spoiled before it came here.
func notJSON(data []byte) string {
	switch {
	case len(bytes.TrimSpace(data)) == 0:
		return "the file is empty"
	case bytes.HasPrefix(data, []byte("\xef\xbb\xbf")):
		return "the file begins with a byte order mark (BOM), which JSON does not allow"
	case bytes.HasPrefix(bytes.TrimSpace(data), []byte("eyJ")): // base64 of `{"`
		return "looks base64-encoded twice"
	}
	return ""
}

// jsonReason puts an error of encoding/json in words that quote nothing of the input.
func jsonReason(err error, what string) string {
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.Is(err, errAuthsKind):
		return err.Error()
	case errors.As(err, &syntax):
		return fmt.Sprintf("not valid JSON at byte %d", syntax.Offset)
	case errors.As(err, &kind):
		// Value is the JSON kind, in some cases with the number after it. Field begins with a name of our own struct;
		// what follows a dot is a key of the file.
		found, _, _ := strings.Cut(kind.Value, " ")
		if field, _, _ := strings.Cut(kind.Field, "."); field != "" {
			what = fmt.Sprintf("%q", field)
		}
		return fmt.Sprintf("%s is or holds a JSON %s where another type belongs", what, found)
	}
	return what + " cannot be decoded"
}

// whyEmpty looks for what a valid file without entries has in place of them.
func whyEmpty(data []byte) []Problem {
	var helpers struct {
		Store string            `json:"credsStore"`
		ByKey map[string]string `json:"credHelpers"`
	}
	if json.Unmarshal(data, &helpers) == nil && (helpers.Store != "" || len(helpers.ByKey) > 0) {
		return []Problem{{Message: "holds no credentials, helpers are not run"}}
	}
	if isFlatMap(data) {
		return []Problem{{Message: `flat map in a dockerconfigjson: the entries must be under "auths", the kubelet finds none here either`}}
	}
	return nil
}

// isFlatMap tells the content of a legacy `.dockercfg`, which is the bare map of entries.
func isFlatMap(data []byte) bool {
	var members map[string]json.RawMessage
	if json.Unmarshal(data, &members) != nil {
		return false
	}
	for name, body := range members {
		var fields authFields
		isEntry := json.Unmarshal(body, &fields) == nil && fields != authFields{}
		if isEntry && !strings.EqualFold(name, "auths") {
			return true
		}
	}
	return false
}

// parse reads one entry. Warnings are about an entry that is kept.
func (a auth) parse() (_ entry, warnings []string, _ error) {
	var fields authFields
	if err := json.Unmarshal(a.body, &fields); err != nil {
		return entry{}, nil, errors.New(jsonReason(err, "entry"))
	}
	username, password := fields.Username, fields.Password
	// A non-empty auth overrides the plain fields, even one that does not decode (kubelet: DockerConfigEntry).
	if fields.Auth != "" {
		decoded, warning, err := decodeAuth(fields.Auth)
		if err != nil {
			return entry{}, nil, err
		}
		if warning != "" {
			warnings = append(warnings, warning)
		}
		// Split at the first colon: the password may hold more of them (`_json_key` and its JSON).
		var colon bool
		if username, password, colon = strings.Cut(decoded, ":"); !colon {
			return entry{}, nil, errors.New("auth holds no colon between user and password")
		}
		if differs(fields.Username, username) || differs(fields.Password, password) {
			warnings = append(warnings, "username or password differ from auth: auth is used, as the kubelet does")
		}
	}
	if strings.HasSuffix(password, "\n") {
		warnings = append(warnings, "the password ends in a newline (echo without -n?): used as it is")
	}
	made, err := newEntry(a.key, username, password)
	return made, warnings, err
}

// differs reports whether a plain field was written and says something else than auth.
func differs(plain, decoded string) bool {
	return plain != "" && plain != decoded
}

// decodeAuth decodes base64 with padding if it ends in "=" and without otherwise (kubelet:
// decodeDockerConfigFieldAuth). With a warning it takes two things that the kubelet refuses: white space around the
// value and the URL-safe alphabet.
func decodeAuth(auth string) (decoded, warning string, _ error) {
	trimmed := strings.TrimSpace(auth)
	standard, urlSafe := base64.RawStdEncoding, base64.RawURLEncoding
	if strings.HasSuffix(trimmed, "=") {
		standard, urlSafe = base64.StdEncoding, base64.URLEncoding
	}
	for _, try := range []struct {
		encoding *base64.Encoding
		text     string
		warning  string
	}{
		{standard, auth, ""},
		{standard, trimmed, "auth has white space around it: trimmed here, the kubelet refuses it"},
		{urlSafe, trimmed, "auth is in URL-safe base64: accepted here, the kubelet refuses it"},
	} {
		if decoded, err := try.encoding.DecodeString(try.text); err == nil {
			return string(decoded), try.warning, nil
		}
	}
	if strings.Contains(auth, ":") {
		return "", "", errors.New("auth holds user:password as plain text, not as base64")
	}
	return "", "", errors.New("auth is not base64")
}
